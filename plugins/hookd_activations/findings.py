"""Judge the statistics by thresholds, and report each finding once.

Nothing here touches a tensor.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

from hookd import Alarm, Context, PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INCIDENTS = 8
"""Incidents per kind, for different modules; the gauge has all findings."""
SPREADS = frozenset({"saturated"})
"""Kinds of which one module's finding gives others the same: what it outputs is their input."""
FEW = 32
"""Elements that an output needs to be judged: fewer may be 0, or saturated, by chance."""
FADED = 1e-2
"""A vanishing gradient is at most this share of its earlier size."""
UNSEEN = 1e-3
"""If the earlier size is unknown, the gradient must be below the threshold by this factor."""
HALF_LARGEST, LARGEST = 32752.0, 65504.0
"""Bounds of a float16 near overflow: half of its maximum, and the maximum itself, which attention masks use."""


class Findings:
    """The findings of all modules, each reported once as an incident.

    A finding needs `patience` samples in a row that show it; the first sample that does not withdraws it.
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
        self.diverging = _positive(context, "diverging", 10.0)
        self.gauge = context.gauge("finding", "1 while a module shows this finding.", ["module", "kind"])
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._reported: dict[str, set[str]] = {}

    def see(self, kind: str, module: str, message: str, *, holds: bool, patience: int = 0, **fields: Any) -> None:
        """Take one sample; an incident is `message`, formatted with `module` and the fields.

        While a module has a finding that SPREADS, that of another one is not reported: it probably has the same cause.
        """
        if not self.note(kind, module, holds=holds, patience=patience) or len(self._reported[kind]) > INCIDENTS:
            return
        if kind in SPREADS and any(
            alarm.is_on for (of, name), alarm in self._alarms.items() if of == kind and name != module
        ):
            return
        self.report(kind, module, message, **fields)

    def note(self, kind: str, module: str, *, holds: bool, patience: int = 0, weight: int = 1) -> bool:
        """Take one sample, which counts as `weight` samples; return whether the finding is to be reported, which is so once."""
        reported = self._reported.setdefault(kind, set())
        alarm = self._alarms.get((kind, module))
        if alarm is None:
            if not holds:
                return False
            alarm = self._alarms[kind, module] = Alarm(0, for_steps=patience or self.patience)
        was_on = alarm.is_on
        updates = [alarm.update(holds) for _ in range(weight)]
        starts = any(updates)
        if was_on != alarm.is_on:
            self.gauge.labels(module, kind).set(alarm.is_on)
        if not starts or module in reported:
            return False
        reported.add(module)
        return True

    def report(self, kind: str, module: str, message: str, **fields: Any) -> None:
        """Report a finding about a module."""
        self._incident(kind, message.format(module=self._context.described(module), **fields), module, fields)

    def report_all(self, kind: str, modules: Sequence[str], message: str) -> None:
        """Report modules with the same finding, which probably have it for the same reason, as one incident."""
        listed = ", ".join(map(self._context.described, modules[:INCIDENTS]))
        more = f" and {len(modules) - INCIDENTS} more" if len(modules) > INCIDENTS else ""
        self._incident(kind, message.format(modules=listed + more), modules[0], {"modules": list(modules[:INCIDENTS])})

    def _incident(self, kind: str, text: str, module: str, fields: Mapping[str, object]) -> None:
        self._context.incident(kind, text, module=module, **fields)

    def holds(self, kind: str) -> bool:
        """Whether any module has a finding of this kind now."""
        return any(alarm.is_on for (of, _), alarm in self._alarms.items() if of == kind)


def _positive(context: Context, name: str, default: Any, most: float = math.inf) -> Any:
    value = context.option(name, default)
    if not 0 < value <= most:
        least = "must be above 0" if most == math.inf else f"must be above 0 and at most {most:g}"
        raise PluginError(f"activations: {name} {least}, not {value}")
    return value


class Losses:
    """A window of the last losses of each backward in a step (a GAN has two), to detect spikes.

    A spike exceeds the largest loss of the window by more than `factor` times the window's range, and by more than half
    of its median. A noisy loss has a wide range, a falling one a wider one. A positive loss must also exceed the window
    in its logarithm, by twice the range of the logarithms: a loss close to 0 jumps by orders of magnitude whenever a
    sample is hard. For that second condition, `SURELY` times the largest loss is always enough.

    Below `SETTLED` of what the loss once was, a training has converged, and its loss is noise.
    """

    WINDOW, LEAST, PLACES, SURELY, ROW = 64, 20, 8, 1000.0, 5
    SETTLED, EACH = 0.01, 16
    """EACH: losses after which the usual size of a loss is looked at."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._windows: dict[int, deque[float]] = {}
        self._once: dict[int, float] = {}  # the largest median of magnitudes so far
        self._taken: dict[int, int] = {}

    def is_spike(self, place: int, value: float) -> bool:
        """Take one loss and return whether it is a spike; one that is not finite is left to hookd_nan."""
        if place >= self.PLACES or not math.isfinite(value):
            return False
        window = self._windows.setdefault(place, deque(maxlen=self.WINDOW))
        is_spike = False
        if len(window) >= self.LEAST:
            top = max(window)
            is_spike = value > top and value > self._least(place) and self._leaves(window, top, value)
        window.append(value)
        taken = self._taken[place] = self._taken.get(place, 0) + 1
        if taken % self.EACH == 0:
            self._once[place] = max(self._once.get(place, 0.0), median(map(abs, window)))
        return is_spike

    def _least(self, place: int) -> float:
        """Return the size below which a loss is noise."""
        return self.SETTLED * self._once.get(place, 0.0)

    def forget(self) -> None:
        """Forget all losses."""
        self._windows.clear()
        self._once.clear()
        self._taken.clear()

    def growth(self, place: int) -> float:
        """Return the factor by which the last losses exceed the median of those before; 0 unless they exceed all of those.

        In a divergence each loss of a row is larger than any before it. A spike is over before that.
        """
        window = self._windows.get(place, deque())
        if len(window) < self.LEAST + self.ROW or window[-1] <= window[0]:  # most often known at once
            return 0.0
        values = list(window)
        before, last = values[: -self.ROW], values[-self.ROW :]
        if min(last) <= max(*before, self._least(place)):
            return 0.0
        usual = median(before)
        return min(last) / usual if usual > 0 else 0.0

    def _leaves(self, window: deque[float], top: float, value: float) -> bool:
        low = min(window)
        is_above = value - top > max(self._factor * (top - low), abs(median(window)) / 2)
        return is_above and (low <= 0 or value / top > min((top / low) * (top / low), self.SURELY))


class Raise:
    """The last rise of a learning rate, which explains a spike that follows."""

    FACTOR, STEPS, OPTIMIZERS = 1.5, 20, 64
    """A rise is at least by this factor, and explains the losses of so many steps. So many optimizers are known."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}
        self._rise: tuple[int, float, float] | None = None

    def take(self, optimizer: int, rate: object, step: int) -> None:
        """Take the rate of an optimizer, which is named by its id, in a step."""
        before = self._rates.get(optimizer)
        if rate == before or (type(rate) is not float and type(rate) is not int):  # or it is on a device
            return
        if before and rate >= self.FACTOR * before:
            self._rise = (step, before, float(rate))
        if len(self._rates) >= self.OPTIMIZERS:
            self._rates.clear()
        self._rates[optimizer] = float(rate)

    def before(self, step: int) -> tuple[float, float] | None:
        """Return the rates before and after a rise that is not long ago at this step, else None."""
        if self._rise is None or not 0 <= step - self._rise[0] <= self.STEPS:
            return None
        return self._rise[1:]


class Course:
    """The last values of a quantity, to compare the next one with."""

    WINDOW, LEAST = 32, 5
    __slots__ = ("_window",)

    def __init__(self) -> None:
        self._window = array("d")  # a deque would take 700 bytes, and there are several for each module

    def relative(self, value: float) -> float:
        """Return `value` relative to the median of the values taken, 1 while there are too few."""
        before = median(self._window) if len(self._window) >= self.LEAST else 0.0
        return value / before if before > 0 else 1.0

    def take(self, value: float) -> None:
        """Add a value, unless it is 0 or not finite."""
        if 0 < value < math.inf:
            if len(self._window) == self.WINDOW:
                self._window.pop(0)
            self._window.append(value)
