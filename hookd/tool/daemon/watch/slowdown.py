"""Detect that the steps of a run take much longer than its own steps did before, and in which phase.

The ranks of a run wait for each other, so all of them have the same step time: one rank of each run is watched. Inference is not
part of a step. Steps are compared in blocks, so that a checkpoint or a collection of garbage does not count.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.fleet import ranks
from hookd.tool.reports.wording import seconds as duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.watcher import Declared

SLOWDOWN, OVER = "slowdown", "slowdown_over"
"""The kinds of its incidents."""
BLOCK_STEPS, BLOCK_S = 5, 5.0
"""Minimum length of a block, in steps and in seconds."""
RECENT = 6
"""Number of consecutive slow blocks that make a slowdown."""
PAST = 12
"""Minimum number of blocks before them."""
MOST = 240
"""Number of blocks that are remembered."""
WELL = 3
"""Number of consecutive recovered blocks that end a slowdown."""
FACTOR = 2.0
"""Minimum step time of a slow block, as a multiple of the usual step time."""
WELL_FACTOR = 1.3
"""Maximum step time of a recovered block, as a multiple of the usual step time."""
LEAST_S = 0.005
"""Minimum increase of the step time, in seconds."""
MOST_SHARE = 2 / 3
"""Minimum share of the increase for which the message names one phase only; otherwise it names two."""
WORDS = {
    "data": "waiting for data", "collectives": "waiting for other ranks", "forward": "the forward", "backward": "the backward",
    "optimizer": "the optimizer", "other": "code outside of the model and the optimizer",
}  # fmt: skip


class Progress(NamedTuple):
    """The progress of a rank: when, its steps, and its seconds by phase until then."""

    now: float
    steps: float
    phases: Mapping[str, float]


@dataclass
class Course:
    """The step times of one rank.

    Attributes:
        blocks: seconds a step by phase, of the last blocks.
        usual: the medians before the slowdown that was reported; None if none was.
        slow: number of blocks since then.
    """

    blocks: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=MOST))
    usual: Mapping[str, float] | None = None
    slow: int = 0
    _last: Progress | None = None

    def take(self, progress: Progress) -> bool:
        """Take the progress of the rank; return whether it completes a block."""
        last = self._last
        if last is None or progress.steps < last.steps:
            self._last = progress
            return False
        steps = progress.steps - last.steps
        if steps < BLOCK_STEPS or progress.now - last.now < BLOCK_S:
            return False
        phases = {phase: max(0.0, s - last.phases.get(phase, 0.0)) / steps for phase, s in progress.phases.items()}
        self.blocks.append(phases)
        self._last, self.slow = progress, self.slow + 1
        return True

    def slowed(self) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Return seconds a step by phase, before and now, if all recent blocks are slow."""
        blocks = list(self.blocks)
        past, recent = blocks[:-RECENT], blocks[-RECENT:]
        if len(past) < PAST:
            return None
        usual_s = statistics.median(map(_total, past))
        least_s = min(map(_total, recent))
        is_slow = least_s >= FACTOR * usual_s and least_s - usual_s >= LEAST_S
        return (_medians(past), _medians(recent)) if is_slow else None


class Slowdown:
    """Watches the step time of every run; reports that it has grown, and when that is over."""

    families: Sequence[Declared] = ()

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._clock = fleet, clock
        self._courses: dict[Target, Course] = {}

    def poll(self, targets: Sequence[Target]) -> None:
        """Read the progress of one rank of each run; see `watch.Watcher`."""
        self._courses = {target: self._courses.get(target) or Course() for target in ranks.first_of_runs(targets)}
        for target, course in self._courses.items():
            progress = _progress_of(target, self._clock())
            if progress is not None and course.take(progress):
                self._judge(target, course, progress)

    def samples(self, _target: Target) -> tuple[()]:
        """Return nothing: the phases are the target's."""
        return ()

    def _judge(self, target: Target, course: Course, progress: Progress) -> None:
        if SLOWDOWN in target.ongoing:
            self._judge_end(target, course, progress)
            return
        slowed = course.slowed()
        if slowed is None:
            return
        usual, recent = slowed
        course.usual, course.slow = usual, 0
        step_s, usual_s = _total(recent), _total(usual)
        more = sorted(recent, key=lambda phase: usual.get(phase, 0.0) - recent[phase])
        phase = more[0]
        is_most = recent[phase] - usual.get(phase, 0.0) >= MOST_SHARE * (step_s - usual_s)
        parts = [
            f"{WORDS.get(one, one)} takes {duration(recent[one])} instead of {duration(usual.get(one, 0.0))}"
            for one in more[: 1 if is_most else 2]
        ]
        message = f"a step takes {duration(step_s)}, {step_s / usual_s:.1f} times as long as before ({duration(usual_s)}): {' and '.join(parts)}"
        self._fleet.report(
            target, SLOWDOWN, message, step=ranks.step_of(target, progress.steps), seconds=step_s, usual_seconds=usual_s,
            phase=phase, phase_seconds=recent[phase], phase_usual_seconds=usual.get(phase, 0.0),
        )  # fmt: skip

    def _judge_end(self, target: Target, course: Course, progress: Progress) -> None:
        last = list(course.blocks)[-WELL:]
        step_s, usual = statistics.median(map(_total, last)), course.usual
        if usual is not None and max(map(_total, last)) <= WELL_FACTOR * _total(usual):
            message = f"a step takes {duration(step_s)} again"
        elif course.slow >= MOST / 2 or (usual is None and len(course.blocks) >= PAST):  # or the daemon was restarted
            message = f"a step still takes {duration(step_s)}, which is the usual time from now on"
        else:
            return
        self._fleet.report(target, OVER, message, step=ranks.step_of(target, progress.steps))
        course.blocks.clear()
        course.usual = None


def _progress_of(target: Target, now: float) -> Progress | None:
    """Return the progress of a rank; None if its phases are not measured, or its page is invalid."""
    read = ranks.phase_seconds(target)
    return None if read is None else Progress(now, *read)


def _total(phases: Mapping[str, float]) -> float:
    return sum(phases.values())


def _medians(blocks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = list(blocks)
    return {phase: statistics.median(row.get(phase, 0.0) for row in rows) for phase in rows[-1]}
