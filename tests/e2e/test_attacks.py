"""The attacks of `make attacks`, in their short form: none gets through. docs/security.md has the full table.

Those that take longest even so are made by `make long`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.attacks.__main__ import load
from tests.attacks.attack import NOT_MADE
from tests.support.environment import REPOSITORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="attacks are made as several users: needs root")


@pytest.mark.parametrize(
    "name", [pytest.param(one.name, marks=[pytest.mark.load] * one.is_long, id=one.name) for one in load().values()]
)
def test_an_attack_does_not_get_through(name, tmp_path):
    command = [sys.executable, "-m", "tests.attacks", "--short", "--only", name, "--out", tmp_path / "table.md"]
    done = subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    if NOT_MADE in done.stderr:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
