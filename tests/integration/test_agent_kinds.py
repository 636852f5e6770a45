"""Tensors of every kind that torch has: none ends the process, and of none is memory read that is not its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support import emulated, sanitizers
from tests.support.environment import target_environment
from tests.support.kinds import KINDS

TENSORS, MANY = 5_000, 100_000


@emulated.lacks("madvise")
@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("tensors", [TENSORS, pytest.param(MANY, marks=pytest.mark.load)])
def test_the_kernel_reads_no_memory_that_is_not_there(tensors):
    assert_all_were_shown(shown(tensors), tensors)


@pytest.mark.load
def test_the_sanitizers_see_no_read_that_they_would_not_allow(tmp_path):
    try:
        for name in ("kernel", "entry"):
            sanitizers.build(name, tmp_path)
    except OSError as error:
        pytest.skip(f"gcc has no sanitizers here: {error}")
    assert_all_were_shown(shown(TENSORS, "--sanitized"), TENSORS)


def shown(tensors, *arguments):
    """Run `tests.support.kinds`, which a signal may end."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kinds", "--tensors", str(tensors), *arguments],
        env=target_environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-5000:]}"
    return done.stdout


def assert_all_were_shown(text, tensors):
    rows = re.findall(r"(?m)^(\w+) +(\d+) +(\d+) +(\d+)$", text)
    counts = {name: tuple(map(int, numbers)) for name, *numbers in rows}
    assert counts.keys() == {*KINDS, "all"}
    assert counts["all"][0] == tensors
    assert counts["all"][1] > tensors // 4, "there must be some to be read"
    assert counts["all"][2] > tensors // 10
