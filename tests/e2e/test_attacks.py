"""The attacks of `make attacks`, in their short form: none succeeds. docs/security.md has the full table.

`make test` makes the quick ones of each chapter in one process, `make long` also the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby

import pytest

from tests.attacks.__main__ import SHORT_S, load
from tests.attacks.attack import NOT_MADE
from tests.support.environment import REPOSITORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="attacks are made as several users: needs root")
QUICK = {
    chapter: names
    for chapter, attacks in groupby(load().values(), lambda one: one.chapter)
    if (names := [one.name for one in attacks if not one.is_long])
}


@pytest.mark.timeout(SHORT_S * 4)
@pytest.mark.parametrize("chapter", QUICK)
def test_quick_attacks_do_not_succeed(chapter, tmp_path):
    assert_repelled(QUICK[chapter], tmp_path)


@pytest.mark.load
@pytest.mark.parametrize("name", [one.name for one in load().values() if one.is_long])
def test_a_long_attack_does_not_succeed(name, tmp_path):
    assert_repelled([name], tmp_path)


def assert_repelled(names, tmp_path):
    """Make attacks, each with a time limit of its own; skip where one cannot be made on this machine."""
    chosen = [word for name in names for word in ("--only", name)]
    command = [sys.executable, "-m", "tests.attacks", "--short", *chosen, "--out", tmp_path / "table.md"]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not_made := [line.strip() for line in done.stderr.splitlines() if NOT_MADE in line]:
        pytest.skip("; ".join(not_made))
