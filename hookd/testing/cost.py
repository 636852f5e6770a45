"""What a plugin costs a training: in one process, with it and without it in turn."""

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

    Blocks of steps come as A B B A in one process; of the ratios of neighbours the median is taken. The test fails
    only where the lower end of its 95 % bounds is above `ratio`, so a busy machine alone does not fail it.

    Args:
        ratio: 1.2: 20 % more at most.
        plugins: classes, or names of installed plugins.
        make: makes the training; by default 200 small layers, where hooks weigh most.
        pairs: of blocks, 12 or more.
        steps: of each block.
        options: of the first plugin.

    Raises:
        AssertionError: with the median, its bounds and what plain blocks differ from each other.
    """
    found = overhead(plugins, make=make, pairs=pairs, steps=steps, options=options)
    one, control = found.ratio, found.control
    told = f"{one.value:.3f} times (95 %: {one.low:.3f} to {one.high:.3f}); plain to plain {control.value:.3f}"
    assert one.low <= ratio, f"a step takes {told}, and may take {ratio}"


def overhead(
    plugins: tuple[type[Plugin] | str, ...],
    *,
    make: Callable[[], Training] = many_modules,
    pairs: int = PAIRS,
    steps: int = 2,
    options: Mapping[str, object] | None = None,
) -> Pairs:
    """Measure blocks of steps in turn, in ns of CPU time of this thread; torch is kept to one thread meanwhile."""
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
            found = alternate(block, observing, pairs, training.step)
        assert not target.errors, f"a hook raised: {target.logs}"
        return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
