"""Bounds on the cost of a module call, as ratios inside one run."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.bench.hot_path import NOBODY, TIMING, TORCH

pytestmark = pytest.mark.bench


@cache
def figures() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "tests.bench.hot_path"]
    pieces = [f"--piece={name}" for name in (NOBODY, TIMING, TORCH)]
    done = subprocess.run(
        [*command, *pieces], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True
    )
    result: dict[str, dict[str, float]] = json.loads(done.stdout)["pieces"]
    return result


def test_a_call_of_an_unselected_module_is_hardly_dearer_than_an_unpatched_one() -> None:
    assert figures()[NOBODY]["ratio"] <= 1.25, figures()


def test_timing_costs_less_than_torchs_own_hooks_that_do_nothing() -> None:
    assert figures()[TIMING]["ratio"] - 1 <= 0.7 * (figures()[TORCH]["ratio"] - 1), figures()


def test_the_control_says_that_the_figures_can_be_trusted() -> None:
    for name in (NOBODY, TIMING, TORCH):
        assert 0.95 <= figures()[name]["control"] <= 1.05, figures()
