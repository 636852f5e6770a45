"""Measure the cost of a plugin, by alternating blocks of steps with and without it in one process."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from hookd.testing.target import FakeTarget
from hookd.testing.training import Training, many_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hookd.api.plugin import Plugin
    from hookd.testing.pairs import Pairs

PAIRS = 24


def assert_overhead_below(
    ratio: float,
    *plugins: type[Plugin] | str,
    make: Callable[[], Training] = many_modules,
    pairs: int = PAIRS,
    steps: int = 2,
    **options: object,
) -> None:
    """Check that a step with these plugins takes less than `ratio` times as much CPU time as without them.

    Blocks of steps run in the order A B B A in one process, and the median of the ratios of neighbors is taken. The test
    fails only if the lower 95 % bound of the median is above `ratio`, so a busy machine alone does not fail it.

    Args:
        ratio: the limit, for example 1.2 for at most 20 % more.
        plugins: classes, or names of installed plugins.
        make: creates the training; by default 200 small layers, where the overhead of hooks is greatest.
        pairs: number of pairs of blocks, 12 or more.
        steps: number of steps of each block.
        options: of the first plugin.

    Raises:
        AssertionError: the limit is exceeded; the message has the median, its bounds, and the ratio of plain blocks.
    """
    measured = overhead(plugins, make=make, pairs=pairs, steps=steps, options=options)
    median, control = measured.ratio, measured.control
    figures = (
        f"{median.value:.3f} times (95 %: {median.low:.3f} to {median.high:.3f}); plain to plain {control.value:.3f}"
    )
    assert median.low <= ratio, f"a step takes {figures}, and may take {ratio}"


def overhead(
    plugins: tuple[type[Plugin] | str, ...],
    *,
    make: Callable[[], Training] = many_modules,
    pairs: int = PAIRS,
    steps: int = 2,
    options: Mapping[str, object] | None = None,
) -> Pairs:
    """Measure alternating blocks of steps with and without the plugins, in ns of this thread's CPU time.

    Meanwhile, torch uses one thread.
    """
    from hookd.testing.pairs import alternate

    training = make()

    def block() -> float:
        begun = time.thread_time_ns()
        for _ in range(steps):
            training.step()
        return float(time.thread_time_ns() - begun)

    with _one_thread(), FakeTarget(record=False) as target:
        target.start(*plugins, **(options or {}))
        with target.away() as observing:
            measured = alternate(block, observing, pairs, training.step)
        assert not target.errors, f"a hook raised: {target.logs}"
        return measured


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
