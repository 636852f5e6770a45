"""What the numbers mean: findings with thresholds, told once. No tensor in here. Runs in the target."""

from __future__ import annotations

import math
from array import array
from collections import deque
from statistics import median
from typing import Any

from hookd import Context, PluginError

INCIDENTS = 8
"""Of one kind so many are reported, for different modules; the gauge shows all."""
FEW = 32
"""Fewer elements than this may be 0, or saturated, by chance."""
FADED = 1e-2
"""A gradient that vanishes has been so many times larger before; where nobody saw that, it must be smaller by UNSEEN."""
UNSEEN = 1e-3
HALF_LARGEST, LARGEST = 32752.0, 65504.0
"""Of float16: a value above the half overflows at the next doubling; the largest itself is what masks are made of."""


class Findings:
    """Keeps what was found of which module, and tells a person once.

    A finding needs `patience` samples in a row that show it; the first that does not takes it back.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.patience = _positive(context, "patience", 3)
        self.dead = _positive(context, "dead", 0.99, most=1.0)
        self.saturated = _positive(context, "saturated", 0.95, most=1.0)
        self.vanishing = _positive(context, "vanishing", 1e-4)
        self.exploding = _positive(context, "exploding", 100.0)
        self.unchanged = _positive(context, "unchanged", 20)
        self.spike = _positive(context, "spike", 3.0)
        self.gauge = context.gauge("finding", "1 while a module shows this.", ["module", "kind"])
        self._rows: dict[tuple[str, str], int] = {}
        self._told: dict[str, set[str]] = {}

    def see(self, kind: str, module: str, message: str, *, holds: bool, patience: int = 0, **fields: Any) -> None:
        """Take one sample; `message` is formatted with `module` and the fields if it is to be told."""
        row = self._rows.get((kind, module), 0)
        if not holds:
            if row:
                self._rows[kind, module] = 0
                if module in self._told.get(kind, ()):
                    self.gauge.labels(module, kind).set(0)
            return
        self._rows[kind, module] = row + 1
        if row + 1 >= (patience or self.patience):
            self.gauge.labels(module, kind).set(1)
            self._tell(kind, module, message, fields)

    def _tell(self, kind: str, module: str, message: str, fields: dict[str, Any]) -> None:
        told = self._told.setdefault(kind, set())
        if module not in told:
            told.add(module)
            if len(told) <= INCIDENTS:
                text = message.format(module=module, **fields)
                self._context.incident(kind, f"{text} at {self._context.origin}", module=module, **fields)

    def holds(self, kind: str) -> bool:
        """Whether a finding of this kind stands."""
        return any(row and name in self._told.get(kind, ()) for (of, name), row in self._rows.items() if of == kind)


def _positive(context: Context, name: str, default: Any, most: float = math.inf) -> Any:
    value = context.option(name, default)
    if not 0 < value <= most:
        least = "must be above 0" if most == math.inf else f"must be above 0 and at most {most:g}"
        raise PluginError(f"activations: {name} {least}, not {value}")
    return value


class Losses:
    """The last losses of each place in a step (a GAN has two), and whether one leaves their range.

    A spike is a loss above all of the window by more than `factor` times the window's whole range, and by half of its
    median: a noisy loss has a wide range, and one that falls has a wider one. Of positive losses it must be so in the
    logarithm too, by twice its range: one that is almost 0 jumps by orders of magnitude whenever a sample is hard. What is
    `SURELY` times above all of the window is a spike in any case.
    """

    WINDOW, LEAST, PLACES, SURELY = 64, 20, 8, 1000.0

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._windows: dict[int, deque[float]] = {}

    def is_spike(self, place: int, value: float) -> bool:
        """Take one loss and judge it by those before; what is not finite is another's business."""
        if place >= self.PLACES or not math.isfinite(value):
            return False
        window = self._windows.setdefault(place, deque(maxlen=self.WINDOW))
        found = False
        if len(window) >= self.LEAST:
            top = max(window)
            found = value > top and self._leaves(window, top, value)
        window.append(value)
        return found

    def _leaves(self, window: deque[float], top: float, value: float) -> bool:
        low = min(window)
        found = value - top > max(self._factor * (top - low), abs(median(window)) / 2)
        return found and (low <= 0 or value / top > min((top / low) * (top / low), self.SURELY))


class Course:
    """The last values of something, and how the next compares with them."""

    WINDOW, LEAST = 32, 5
    __slots__ = ("_window",)

    def __init__(self) -> None:
        self._window = array("d")  # a deque would take 700 bytes, and there are several for each module

    def relative(self, value: float) -> float:
        """Give `value` relative to the median of those taken, 1 while they are too few."""
        before = median(self._window) if len(self._window) >= self.LEAST else 0.0
        return value / before if before > 0 else 1.0

    def take(self, value: float) -> None:
        """Let it be one of them; what is 0 or not finite is not."""
        if 0 < value < math.inf:
            if len(self._window) == self.WINDOW:
                self._window.pop(0)
            self._window.append(value)
