"""The report of a failed test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEST = """
import sys
from tests.support.processes import Process

def test_fails():
    with Process([sys.executable, "-c", "print('step 7', flush=True); input()"], env={}, stdin=True) as target:
        target.expect("step 7")
        assert target.wait(0) == 0
"""


def test_it_has_the_last_lines_of_processes_their_states_and_the_load(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:randomly", "test_it.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    sections = done.stdout.partition("- process ")[2]
    assert done.returncode == 1
    for wanted in ("\nstep 7\n", "\nstate at the error:\n", "machine at the failure", "\nload "):
        assert wanted in sections, done.stdout
    assert re.search(r"\n +\d+ +\d+ [RSD] \(\w+", sections), done.stdout
