"""The last minutes of each target: steps, step times and losses.

They are shown on the target's web page. A sample has 64 bytes and is taken every 2 s. Of each target 450 samples are
kept: 15 minutes, 29 kB.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.fleet.ranks import family
from hookd.tool.daemon.watch.watcher import Watcher
from hookd.tool.reports.report import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Snapshot

EVERY_S = 2.0
SPAN_S = 900.0
LOSSES = 4
"""Number of losses per step that are kept, one for each of the first backwards."""
RECENT_S = 30.0
"""Seconds that a current value covers.

If a step takes longer, the value covers the last sample.
"""
LONG, LONG_S = 3.0, 10.0
"""A step in progress is drawn from so many times the usual duration, and so many seconds, on."""
_WIDTH = 4 + LOSSES
_CAPACITY = int(SPAN_S / EVERY_S)
ABSENT = math.nan
NOT_FINITE = math.inf


class Sample(NamedTuple):
    """A target at one time.

    Attributes:
        time: unix seconds, by the clock as it is set when the sample is read: setting the clock does not count as passed time.
        steps: counted since the attach.
        timed: number of those steps whose time is known.
        seconds: total time of those.
        losses: of the first backwards of a step; ABSENT if there is none, NOT_FINITE for a NaN or an infinity.
    """

    time: float
    steps: float
    timed: float
    seconds: float
    losses: tuple[float, ...]


class History(Watcher):
    """A watcher that keeps samples, and serves nothing at a scrape.

    Args:
        clock: monotonic seconds, for the interval between samples.
        now: unix seconds, for the time of returned samples.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._clock, self._now = clock, now
        self._due = -math.inf
        self._lock = threading.Lock()
        self._kept: dict[Target, array[float]] = {}

    def poll(self, targets: Sequence[Target]) -> None:
        """Sample each living target if it is time; forget targets that are gone."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + EVERY_S - 0.5  # polls are about a second apart, not exactly
        now = self._clock()
        taken = {target: _sample(snapshot, now) for target in targets if (snapshot := _living(target)) is not None}
        with self._lock:
            self._kept = {target: self._kept.get(target) or array("d") for target in targets}
            for target, sample in taken.items():
                cells = self._kept[target]
                cells.extend(sample)
                del cells[: -_WIDTH * _CAPACITY]

    def now(self) -> float:
        """Return the present, as the time of samples counts: Unix seconds."""
        return self._now()

    def of(self, target: Target) -> list[Sample]:
        """Return the samples of a target, oldest first. There are none if it was never looked at."""
        with self._lock:
            cells = list(self._kept.get(target, ()))
        shift = self._now() - self._clock()
        rows = (cells[at : at + _WIDTH] for at in range(0, len(cells), _WIDTH))
        return [Sample(row[0] + shift, row[1], row[2], row[3], tuple(row[4:])) for row in rows]


def _living(target: Target) -> Snapshot | None:
    return target.last() if target.ended is None else None


def _sample(snapshot: Snapshot, now: float) -> array[float]:
    """Return the cells of one sample. The page may contain anything: numbers are checked when they are used."""
    timed, seconds = _times(snapshot)
    loss = family(snapshot, "hookd_activations_loss", ("backward",))
    by_phase = {} if loss is None else dict(zip((phase for (phase,) in loss.values), loss.first, strict=True))
    losses = [loss.cells[by_phase[str(n)]] if loss and str(n) in by_phase else ABSENT for n in range(LOSSES)]
    known = (NOT_FINITE if str(n) in by_phase and not math.isfinite(value) else value for n, value in enumerate(losses))
    return array("d", (now, float(steps(snapshot)), timed, seconds, *known))


def _times(snapshot: Snapshot) -> tuple[float, float]:
    """Return the number of timed steps and their total seconds, from the core's histogram."""
    times = family(snapshot, "hookd_step_seconds", ())
    if times is None or not times.first:
        return 0.0, 0.0
    cells = times.cells[times.first[0] : times.first[0] + times.width]
    return sum(cells[:-1]), cells[-1]


def step_times(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return pairs of unix time and mean step time in seconds, between samples.

    There is no pair where there were no steps.
    """
    means = ((after.time, _mean(before, after)) for before, after in itertools.pairwise(samples))
    return [(when, mean) for when, mean in means if mean is not None]


def _mean(before: Sample, after: Sample) -> float | None:
    count, seconds = after.timed - before.timed, after.seconds - before.seconds
    mean = seconds / count if count > 0 else math.nan
    return mean if 0 < mean < math.inf else None


def unfinished(samples: Sequence[Sample], now: float) -> tuple[float, float] | None:
    """Return when the step in progress began, and how many seconds ago that is; None if it does not take long yet.

    It takes long if it takes `LONG` times as long as the last steps, and longer than `LONG_S`.
    """
    if len(samples) < 2:
        return None
    began = next((after.time for before, after in _backwards(samples) if before.steps != after.steps), samples[0].time)
    usual = _mean(*ends) if (ends := recent([one for one in samples if one.time <= began])) is not None else None
    return (began, now - began) if now - began > max(LONG_S, LONG * (usual or 0.0)) else None


def _backwards(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    return ((samples[at - 1], samples[at]) for at in range(len(samples) - 1, 0, -1))


def step_now(samples: Sequence[Sample]) -> float | None:
    """Return the mean time of the last steps in seconds, None if unknown."""
    ends = recent(samples)
    return _mean(*ends) if ends is not None else None


def steps_per_second(samples: Sequence[Sample]) -> float | None:
    """Return the current number of steps per second of a target, None if unknown."""
    ends = recent(samples)
    if ends is None:
        return None
    made, seconds = ends[1].steps - ends[0].steps, ends[1].time - ends[0].time
    return made / seconds if seconds > 0 and made >= 0 else None


def recent(samples: Sequence[Sample]) -> tuple[Sample, Sample] | None:
    """Return the last sample and the earlier one for the current rate."""
    if len(samples) < 2:
        return None
    last = samples[-1]
    at = next(n for n, one in enumerate(samples) if one.time >= last.time - RECENT_S)
    return samples[min(at, len(samples) - 2)], last
