"""Conditions and rates over several steps, which plugins report."""

from __future__ import annotations

from collections import deque


class Alarm:
    """An alarm that turns on when a value has been above a limit several times in a row, and off when it falls to another.

    Values between the two limits change nothing, so a value that hovers around the limit does not turn it on and off. A NaN
    turns it off. A bool is a value too: `Alarm(0, for_steps=3)` turns on after True three times in a row.

        def configure(self, context):
            self.context, self.alarm = context, Alarm(0.9, clear=0.5, for_steps=10)

        def step_post(self):
            if self.alarm.update(self.share):
                self.context.incident("crowded", f"one expert gets {self.share:.0%} of the tokens")

    Args:
        above: the limit that turns it on.
        clear: the limit that turns it off; None: the same.
        for_steps: number of updates in a row above the limit that turn it on.

    Attributes:
        is_on: whether it is on.
    """

    __slots__ = ("_above", "_clear", "_for_steps", "_row", "is_on")

    def __init__(self, above: float, *, clear: float | None = None, for_steps: int = 1) -> None:
        self._above, self._clear, self._for_steps = above, above if clear is None else clear, for_steps
        self._row = 0
        self.is_on = False

    def update(self, value: float) -> bool:
        """Take one value; return whether the alarm turns on now."""
        if self.is_on:
            self.is_on = value > self._clear
            return False
        self._row = self._row + 1 if value > self._above else 0
        self.is_on = self._row >= self._for_steps
        if self.is_on:
            self._row = 0
        return self.is_on


class RecentRate:
    """The rate per step of something over the last steps, such as the share of steps in which gradients were clipped.

        def configure(self, context):
            self.clipped = RecentRate(100)
            self.gauge = context.gauge("clipped_ratio", "Share of clipped steps, of the last 100.")

        def step_post(self, step):
            self.clipped.add(step, self.was_clipped)
            self.gauge.set(self.clipped.per_step(step))

    Args:
        steps: number of steps that count.
    """

    __slots__ = ("_amounts", "_begin", "_steps", "_sum")

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._amounts: deque[tuple[int, float]] = deque()
        self._sum = 0.0
        self._begin: int | None = None

    def add(self, step: int, amount: float = 1.0) -> None:
        """Add an amount to a step; steps must not decrease."""
        if self._begin is None:
            self._begin = step
        self._amounts.append((step, amount))
        self._sum += amount
        self._forget(step)

    def per_step(self, step: int) -> float:
        """Return the sum of the amounts of the last steps, up to `step`, by the number of these steps.

        Until the first `steps` steps have passed, those since the first amount count. 0 if there was none.
        """
        if self._begin is None:
            return 0.0
        self._forget(step)
        return self._sum / min(self._steps, step - self._begin + 1)

    def _forget(self, step: int) -> None:
        while self._amounts and self._amounts[0][0] <= step - self._steps:
            self._sum -= self._amounts.popleft()[1]
        if not self._amounts:
            self._sum = 0.0  # without the rounding of what was added and subtracted
