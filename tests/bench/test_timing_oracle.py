"""How near the times of hookd_timing are to those of torch.profiler and of nodes timed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench


@cache
def figures() -> dict[str, dict[str, dict[str, float]]]:
    script = Path(__file__).with_name("timing_oracle.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=True)
    return json.loads(done.stdout)


@pytest.mark.timeout(660)
@pytest.mark.parametrize("model", ["transformer", "convnet"])
@pytest.mark.parametrize("oracle", ["forward_profiler", "backward_profiler", "backward_by_hand"])
def test_modules_above_a_hundredth_of_the_step_are_right_within_a_tenth(model, oracle) -> None:
    found = figures()[model][oracle]
    assert found["modules"] >= 8, figures()
    assert found["median"] <= 0.10, figures()
