"""Measure the silence of a target: how long it has made no event, where it stands, and when the silence is too long."""

from __future__ import annotations

import math
import re
import zlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import HookdError
from hookd.tool.daemon.fleet import ranks
from hookd.tool.daemon.watch.verdict import RankPosition
from hookd.tool.linux import proc
from hookd.tool.reports.report import steps
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Heartbeat, Snapshot

START_STEPS = 3
"""Steps after which the usual step time is known; the first steps compile, connect and choose kernels."""
REMEMBERED = 16
"""Number of long silences that are remembered for each phase."""
MUTE_S = 3.0
"""Seconds after which the agent's own thread counts as blocked; it runs about once a second."""
MAX_GROUPS = 16
_GROUP = re.compile(r"[0-9][-0-9,+#]{0,79}")
_ENGINE = "thread"
"""The page's name for a thread that Python has not started: an autograd thread, which works for the training thread."""
_NOTEBOOKS = ("ipykernel_launcher.py", "ipykernel")


class Progress(NamedTuple):
    """The fields of a heartbeat that change with the events, see `hookd.wire.page.Heartbeat`."""

    tid: int
    module: int
    events: int
    phase: str
    step: int


NO_PROGRESS = Progress(0, 0, 0, "other", 0)
"""The progress of a target that has not called a module yet."""


class Patience(NamedTuple):
    """The settings of `[hang]`: when a silence is a hang, see `hookd.tool.config.ServeConfig`."""

    after_s: float = 60.0
    factor: float = 5.0
    start_s: float = 600.0


class Silence:
    """The silence of one target, by the clock of its owner.

    Attributes:
        since: when the last event was seen.
        at_least: whether the silence may be older than `since`, because no event was seen yet.
        progress: the target's progress since then; None until it has called a module.
    """

    def __init__(self, now: float, patience: Patience) -> None:
        self.since = now
        self.at_least = True
        self.progress: Progress | None = None
        self._patience = patience
        self._rest: tuple[object, ...] = ()
        self._is_start = False  # the training was starting or torch compiled during this silence: it is not typical
        self._armed = now
        self._long: dict[str, deque[float]] = {}
        self._hung: dict[str, float] = {}
        self._middle: tuple[float, float | None, float] | None = None

    def see(self, snapshot: Snapshot, now: float, *, was_reported: bool) -> bool:
        """Compare a snapshot with the previous one.

        Args:
            snapshot: the last copy of the page.
            now: by the clock.
            was_reported: whether the silence until now was reported as a hang.

        Returns:
            Whether there was an event.
        """
        beat = training_thread(snapshot)
        progress = None if beat is None else Progress(beat.tid, beat.module, beat.events, beat.phase, beat.step)
        rest = tuple((beat.tid, beat.module, beat.events) for beat in snapshot.heartbeats if beat.name == _ENGINE)
        if (progress, rest) == (self.progress, self._rest):
            self._is_start = self._is_start or (self._is_long(now - self.since) and _is_start(snapshot))
            return False
        is_first = self.progress is None
        if self.progress is not None:
            self._learn(self.progress.phase, now - self.since, was_reported=was_reported)
            self.at_least = False
        self.progress, self._rest, self.since = progress, rest, now
        self._middle, self._is_start = None, False
        return not is_first

    def _learn(self, phase: str, silent_s: float, *, was_reported: bool) -> None:
        """Remember a silence that is over. A silence that was reported as a hang counts as usual from the second time on."""
        if self._is_start or not self._is_long(silent_s):
            return
        if was_reported:
            before, self._hung[phase] = self._hung.get(phase, 0.0), silent_s
            silent_s = min(before, silent_s)
        self._long.setdefault(phase, deque(maxlen=REMEMBERED)).append(silent_s)

    def _is_long(self, silent_s: float) -> bool:
        """Whether a silence, if it is usual, raises the patience above `after_s`."""
        return silent_s * self._patience.factor > self._patience.after_s

    def rearm(self, now: float) -> None:
        """Restart the wait: the target could not make progress until now."""
        self._armed, self._middle = now, None

    def age_s(self, now: float) -> float:
        """Return the seconds since the last event that was seen."""
        return now - self.since

    def is_overdue(self, target: Target, snapshot: Snapshot, now: float, *, is_deserted: bool) -> bool:
        """Whether the target is silent for too long.

        Args:
            target: whose silence this is.
            snapshot: the last copy of its page.
            now: by the clock.
            is_deserted: whether another rank of its run has ended.
        """
        waited = now - max(self.since, self._armed)
        if waited < self._patience.after_s / 2:
            return False
        if self._middle is None:
            self._middle = (now, target.usage().cpu_s, _value(snapshot, "hookd_agent_ticks"))
        if waited < self._patience.after_s or self._is_idle(target, snapshot):
            return False
        return waited >= self.patience_s(snapshot, is_deserted=is_deserted)

    def _is_idle(self, target: Target, snapshot: Snapshot) -> bool:
        """Whether the target may have nothing to do: a service between requests, or a notebook between cells."""
        if self._phase != "other" or target.identity.world_size > 1:
            return False
        return steps(snapshot) == 0 or target.identity.script.endswith(_NOTEBOOKS)

    @property
    def _phase(self) -> str:
        return (self.progress or NO_PROGRESS).phase

    def patience_s(self, snapshot: Snapshot, *, is_deserted: bool = False) -> float:
        """Return the seconds that the target may be silent at this point; see `is_overdue`."""
        usual: float = max([*self._long.get(self._phase, ()), step_s(snapshot)])
        enough: float = max(self._patience.after_s, self._patience.factor * usual)
        # A rank whose peers have ended may wait for them, or do alone the work that follows the training.
        is_finishing = is_deserted and self._phase == "other"
        if is_finishing or _is_start(snapshot):
            return max(enough, self._patience.start_s)
        return enough

    def position(self, target: Target, snapshot: Snapshot, now: float) -> RankPosition:
        """Return where the target stands, with the facts of the operating system and the agent."""
        progress = self.progress or NO_PROGRESS
        entry = snapshot.modules.get(progress.module)
        cpu, is_mute = self._meanwhile(target, snapshot, now)
        return RankPosition(
            rank=target.claim.rank,
            for_s=self.age_s(now),
            at_least=self.at_least,
            phase=progress.phase,
            module=one_line(entry.name) if entry is not None else None,
            type=one_line(entry.type) if entry is not None else "",
            place=progress.module,
            model=_model(snapshot),
            step=progress.step,
            is_absolute=target.identity.step_offset is not None,
            state=_state(target.pid),
            cpu=cpu,
            is_mute=is_mute,
            issued=_issued(snapshot),
        )

    def _meanwhile(self, target: Target, snapshot: Snapshot, now: float) -> tuple[float | None, bool]:
        """Return the CPUs used since the middle of the wait, and whether the agent's thread has not run since."""
        if self._middle is None or now <= self._middle[0]:
            return None, False
        began, cpu_s, ticks = self._middle
        used = target.usage().cpu_s
        cpu = None if used is None or cpu_s is None else max(0.0, used - cpu_s) / (now - began)
        is_mute = ticks > 0 and now - began >= MUTE_S and _value(snapshot, "hookd_agent_ticks") == ticks
        return cpu, is_mute


def _is_start(snapshot: Snapshot) -> bool:
    """Whether a step may take much longer than usual: at the start, or while torch compiles."""
    return steps(snapshot) < START_STEPS or _value(snapshot, "hookd_compiling") > 0


def training_thread(snapshot: Snapshot) -> Heartbeat | None:
    """Return the heartbeat of the training thread: the one with the most steps, then the most events."""
    return max(snapshot.heartbeats, key=lambda beat: (beat.step, beat.events), default=None)


def step_s(snapshot: Snapshot) -> float:
    """Return the usual step time: the mean, or the bucket bound of the median if that is less."""
    family = ranks.family(snapshot, "hookd_step_seconds", ())
    if family is None or family.kind != "histogram" or not family.first:
        return 0.0
    *counts, total = family.cells[family.first[0] : family.first[0] + family.width]
    if not (0 < sum(counts) < math.inf and 0 <= total < math.inf and min(counts) >= 0):
        return 0.0
    return min(float(total / sum(counts)), _median_bound(counts, family.buckets))


def _median_bound(counts: list[float], bounds: tuple[float, ...]) -> float:
    below, half = 0.0, sum(counts) / 2
    for bound, count in zip(bounds, counts, strict=False):
        below += count
        if below >= half:
            return bound
    return math.inf


def _model(snapshot: Snapshot) -> int:
    """Return a checksum of the names of all modules, in their order."""
    return zlib.crc32("\n".join(snapshot.modules[key].name for key in sorted(snapshot.modules)).encode())


def _state(pid: int) -> str:
    try:
        return proc.status(pid).state
    except (HookdError, OSError, LookupError, ValueError):
        return ""


def _value(snapshot: Snapshot, name: str) -> float:
    """Return the value of a family; 0 if there is none, or it is not finite."""
    value = float(ranks.scalar(snapshot, name))
    return value if math.isfinite(value) else 0.0


def _issued(snapshot: Snapshot) -> Mapping[str, float]:
    """Return the number of collectives that the rank has issued, by group.

    The values come from the target and are checked.
    """
    family = ranks.family(snapshot, "hookd_collectives", ("group",))
    if family is None:
        return {}
    pairs = zip(family.values[:MAX_GROUPS], family.first[:MAX_GROUPS], strict=True)
    cells = ((values[0], float(family.cells[first])) for values, first in pairs)
    return {group: value for group, value in cells if math.isfinite(value) and _GROUP.fullmatch(group)}
