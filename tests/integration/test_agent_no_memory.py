"""Tensors without memory, whose addresses must not reach C: each training ends as it does without hookd."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environment import TARGETS, target_environment
from tests.targets.no_memory import PROGRAMS

OBSERVERS = [f"{name}:every=1" for name in ("nan", "timing", "activations", "optimizer", "memory", "coverage")]


SHORT = ("wrapper", "spoiled")
"""What `make test` runs; `make long` runs the others, and `make compat` runs all of PROGRAMS in other systems."""


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.load] * (name not in SHORT)) for name in (one.__name__ for one in PROGRAMS)],
)
def test_nothing_differs(program):
    assert outcome(program, *OBSERVERS) == outcome(program)


def outcome(program, *plugins):
    """Run a training of `no_memory.py`, which a signal may end."""
    done = subprocess.run(
        [sys.executable, str(TARGETS / "no_memory.py"), program, *plugins],
        env=target_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout
