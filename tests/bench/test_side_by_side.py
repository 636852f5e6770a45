"""Bounds on hookd's overhead in a training step. On a quiet machine: the upper 95 % bound counts."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.bench.side_by_side import BOUNDS
from tests.bench.tools import ALL, NAN, NOTHING, OBSERVERS

WORKLOADS = ("mlp", "charlm", "convnet")
TIMEOUT_S = 1800
pytestmark = [pytest.mark.bench, pytest.mark.load, pytest.mark.timeout(TIMEOUT_S + 60)]


@cache
def bounds() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "tests.bench.side_by_side"]
    what = [f"--tool={name}" for name in (NOTHING, OBSERVERS, NAN, ALL)] + [f"--workload={name}" for name in WORKLOADS]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *what], cwd=root, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    result: dict[str, dict[str, float]] = json.loads(done.stdout)["bounds"]
    return result


BELOW_THE_FLOOR = pytest.mark.xfail(
    strict=True,
    reason="torch's own hook and one call of the kernel for each output, with nothing around it, cost 1.03 to 1.14",
)


@pytest.mark.parametrize(
    ("name", "workload"),
    [pytest.param(*one, marks=[BELOW_THE_FLOOR] if one[0] == NAN else []) for one in BOUNDS],
)
def test_a_step_costs_no_more_than_was_promised(name, workload) -> None:
    found = bounds()[f"hookd {name}, {workload}"]
    assert found["measured"] <= found["limit"], found


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_nobody_listens_to_costs_nothing_that_can_be_measured(workload) -> None:
    found = bounds()[f"hookd {NOTHING}, {workload}: the control's bound"]
    assert found["measured"] <= found["limit"], found
