"""The output of `python -m tests.attacks` before it attacks anything."""

from __future__ import annotations

import subprocess
import sys

from tests.attacks.__main__ import listed, load
from tests.support.environment import REPOSITORY

WITHOUT_PYTEST = """
import runpy, sys
sys.modules["pytest"] = None  # as where it is not installed
sys.argv = ["tests.attacks", "--list"]
runpy.run_module("tests.attacks", run_name="__main__")
"""


def test_the_list_has_columns():
    attacks = load()
    lines = listed(attacks.values()).splitlines()
    at = lines[0].index(next(iter(attacks.values())).actor)
    assert all(line.startswith(f"{name} ") for name, line in zip(attacks, lines, strict=True))
    assert {line[at - 2 : at] for line in lines} == {"  "}
    assert all(line[at:].startswith(one.actor) for one, line in zip(attacks.values(), lines, strict=True))


def test_without_what_the_tests_need_it_says_how_to_get_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "the attacks need pytest" in done.stderr
    assert "make attacks" in done.stderr
    assert "Traceback" not in done.stderr
