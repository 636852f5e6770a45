"""An attach with all default plugins is hardly noticed by the training: the bound in CI on `tests.bench.attach.steps`."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.bench.attach import steps
from tests.bench.attach.training import Training
from tests.support import interpreters

MOST_OVER_CONTROL = 430_000
"""In turns of an empty loop, because an attach is work in Python: 15 ms on the machine that other figures are of."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("depth", "after_s", "attaches"),
    [
        pytest.param(1, 0.5, 5, id="8 modules"),
        pytest.param(
            500,
            2.0,
            12,
            id="1,000 modules",
            marks=[
                pytest.mark.load,
                pytest.mark.xfail(
                    strict=True,
                    reason="a step of 39 ms becomes one of 117: the import of the agent, and a full collection in two of five attaches",
                ),
            ],
        ),
    ],
)
def test_the_longest_step_around_an_attach_is_hardly_longer_than_without(
    depth: int, after_s: float, attaches: int
) -> None:
    with Training(interpreters.with_torch("here"), *steps.shape(depth)) as training:
        before = _loop_ms(MOST_OVER_CONTROL)
        found = steps.measure(training, attaches, after_s)
        most_over_control = (before + _loop_ms(MOST_OVER_CONTROL)) / 2
    assert found["attach"]["p50"] <= found["control"]["p50"] + most_over_control, (most_over_control, found)
    assert found["wrong"] == 0


def _loop_ms(turns: int) -> float:
    """Return the processor time of an empty loop, the median of nine."""

    def once() -> float:
        began = time.thread_time()
        for _ in range(turns):
            pass
        return time.thread_time() - began

    return 1e3 * statistics.median(once() for _ in range(9))
