"""The second look of `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import emulated

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pathlib
import pytest

@pytest.mark.alone
def test_comes_last():
    assert pathlib.Path("met").exists()

def test_passes():
    assert os.getppid() == 1 or not os.environ.get("WORKER_PYTHON"), "a worker has a PID namespace of its own"

def test_fails_once():
    met = pathlib.Path("met")
    is_first = not met.exists()
    met.touch()
    assert not is_first

"""
CRASHES = """
def test_crashes():
    os.kill(os.getpid(), 9)

def test_comes_after_it():
    pathlib.Path("after").touch()
"""


@emulated.lacks("time")
@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("", 0, ["FLAKY test_it.py::test_fails_once"]),
        (CRASHES, 1, ["FLAKY test_it.py::test_fails_once", "FAILED TWICE test_it.py::test_crashes"]),
    ],
)
def test_what_fails_runs_once_more_alone_and_is_named(tmp_path, more, status, said):
    (tmp_path / "test_it.py").write_text(TESTS + more)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gate", "-n", "1"],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": "-p tests.conftest -p no:randomly",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("FLAKY", "FAILED TWICE"))] == said, done.stdout
    assert done.returncode == status
    assert (tmp_path / "after").exists() == bool(more)
