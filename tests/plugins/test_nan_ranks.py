"""`policy=skip` on two ranks: both skip the same step, though the batch of one alone was bad."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_both_ranks_skip_the_same_step_and_end_with_the_same_weights(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    script, store = ROOT / "tests" / "targets" / "nan_skip.py", tmp_path / "store"
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), store], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        first, second = (rank.communicate(timeout=280)[0].strip() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert first == second
    assert first.startswith("still [4] finite True "), first
