"""The bounds on what a module call may cost, as ratios inside one run."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench


@cache
def figures() -> dict[str, float]:
    script = Path(__file__).with_name("hot_path.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def test_a_call_of_an_unselected_module_is_hardly_dearer_than_an_unpatched_one() -> None:
    assert figures()["unselected_over_plain"] <= 1.25, figures()


def test_timing_costs_less_than_torchs_own_hooks_that_do_nothing() -> None:
    assert figures()["timing_over_torch_hooks"] <= 0.7, figures()


def test_the_control_says_that_the_figures_can_be_trusted() -> None:
    assert 0.95 <= figures()["control"] <= 1.05, figures()
