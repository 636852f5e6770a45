"""How long a target has made no event, where it stands meanwhile, and from when on that is too long."""

from __future__ import annotations

import math
import re
import zlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import HookdError
from hookd.tool.daemon.incidents.incident_log import plain
from hookd.tool.daemon.watch.verdict import Standing
from hookd.tool.linux import proc
from hookd.tool.reports.report import steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Family, Heartbeat, Snapshot

START_STEPS = 3
"""Steps after which it is known how long one takes; the first ones compile, connect and choose kernels."""
REMEMBERED = 16
"""So many long silences of each phase are remembered."""
MUTE_S = 3.0
"""hookd's own thread runs about once a second; where it has not for so long, something keeps it."""
MAX_GROUPS = 16
_GROUP = re.compile(r"[0-9][-0-9,+#]{0,79}")
_ENGINE = "thread"
"""The page's name for a thread that Python has not started: one of autograd's, which works for the training thread."""
_NOTEBOOKS = ("ipykernel_launcher.py", "ipykernel")


class Place(NamedTuple):
    """Of a heartbeat, what changes with the events: see `hookd.wire.page.Heartbeat`."""

    tid: int
    module: int
    events: int
    phase: str
    step: int


NOWHERE = Place(0, 0, 0, "other", 0)
"""Where a target stands that has not called any module yet."""


class Patience(NamedTuple):
    """From when on a silence is a hang: the settings of `[hang]`, see `hookd.tool.config.ServeConfig`."""

    after_s: float = 60.0
    factor: float = 5.0
    start_s: float = 600.0


class Silence:
    """The silence of one target, by a clock that its owner keeps.

    Attributes:
        since: when the last event was seen.
        at_least: whether nobody has looked before that.
        place: where it has stood since then; None as long as it has not called any module.
    """

    def __init__(self, now: float, patience: Patience) -> None:
        self.since = now
        self.at_least = True
        self.place: Place | None = None
        self._patience = patience
        self._rest: tuple[object, ...] = ()
        self._is_start = False  # some of this silence was the start, or torch compiled: nothing to learn from
        self._armed = now
        self._long: dict[str, deque[float]] = {}
        self._hung: dict[str, float] = {}
        self._middle: tuple[float, float | None, float] | None = None

    def see(self, snapshot: Snapshot, now: float, *, was_told: bool) -> bool:
        """Compare with what was seen before.

        Args:
            snapshot: the last copy.
            now: by the clock.
            was_told: whether its silence until now was told as a hang.

        Returns:
            Whether there was an event.
        """
        beat = training_thread(snapshot)
        place = None if beat is None else Place(beat.tid, beat.module, beat.events, beat.phase, beat.step)
        rest = tuple((one.tid, one.module, one.events) for one in snapshot.heartbeats if one.name == _ENGINE)
        if (place, rest) == (self.place, self._rest):
            self._is_start = self._is_start or (self._is_long(now - self.since) and _is_start(snapshot))
            return False
        is_first = self.place is None
        if self.place is not None:
            self._learn(self.place.phase, now - self.since, was_told=was_told)
            self.at_least = False
        self.place, self._rest, self.since = place, rest, now
        self._middle, self._is_start = None, False
        return not is_first

    def _learn(self, phase: str, silent_s: float, *, was_told: bool) -> None:
        """Remember a silence that is over. What was told as a hang is usual from the second time on."""
        if self._is_start or not self._is_long(silent_s):
            return
        if was_told:
            before, self._hung[phase] = self._hung.get(phase, 0.0), silent_s
            silent_s = min(before, silent_s)
        self._long.setdefault(phase, deque(maxlen=REMEMBERED)).append(silent_s)

    def _is_long(self, silent_s: float) -> bool:
        """Whether a silence, if it is usual, makes one wait for longer than `after_s`."""
        return silent_s * self._patience.factor > self._patience.after_s

    def rearm(self, now: float) -> None:
        """Begin to wait anew: what it waited for goes on only now."""
        self._armed, self._middle = now, None

    def age_s(self, now: float) -> float:
        """Give the seconds since the last event that was seen."""
        return now - self.since

    def is_overdue(self, target: Target, snapshot: Snapshot, now: float, *, is_deserted: bool) -> bool:
        """Tell whether it is silent for too long.

        Args:
            target: whose silence it is.
            snapshot: its last copy.
            now: by the clock.
            is_deserted: whether another rank of its run has come to its end.
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
        """Whether it may simply have nothing to do: a service before its next request, a notebook before its next cell."""
        if self._phase != "other" or target.identity.world_size > 1:
            return False
        return steps(snapshot) == 0 or target.identity.script.endswith(_NOTEBOOKS)

    @property
    def _phase(self) -> str:
        return (self.place or NOWHERE).phase

    def patience_s(self, snapshot: Snapshot, *, is_deserted: bool = False) -> float:
        """Give the seconds that it may be silent where it is now; see `is_overdue`."""
        usual: float = max([*self._long.get(self._phase, ()), step_s(snapshot)])
        enough: float = max(self._patience.after_s, self._patience.factor * usual)
        # Who has been left behind may wait for the others, or do alone what comes after the training.
        is_finishing = is_deserted and self._phase == "other"
        if is_finishing or _is_start(snapshot):
            return max(enough, self._patience.start_s)
        return enough

    def standing(self, target: Target, snapshot: Snapshot, now: float) -> Standing:
        """Say where it stands, with what the operating system and the agent know beside it."""
        place = self.place or NOWHERE
        entry = snapshot.modules.get(place.module)
        cpu, is_mute = self._meanwhile(target, snapshot, now)
        return Standing(
            rank=target.claim.rank,
            for_s=self.age_s(now),
            at_least=self.at_least,
            phase=place.phase,
            module=plain(entry.name) if entry is not None else None,
            place=place.module,
            model=_model(snapshot),
            step=place.step,
            is_absolute=target.identity.step_offset is not None,
            state=_state(target.pid),
            cpu=cpu,
            is_mute=is_mute,
            issued=_issued(snapshot),
        )

    def _meanwhile(self, target: Target, snapshot: Snapshot, now: float) -> tuple[float | None, bool]:
        """Give the CPUs used since the middle of the wait, and whether the agent's thread has not run since."""
        if self._middle is None or now <= self._middle[0]:
            return None, False
        began, cpu_s, ticks = self._middle
        used = target.usage().cpu_s
        cpu = None if used is None or cpu_s is None else max(0.0, used - cpu_s) / (now - began)
        is_mute = ticks > 0 and now - began >= MUTE_S and _value(snapshot, "hookd_agent_ticks") == ticks
        return cpu, is_mute


def _is_start(snapshot: Snapshot) -> bool:
    """Whether a step may take much longer now than it usually does."""
    return steps(snapshot) < START_STEPS or _value(snapshot, "hookd_compiling") > 0


def training_thread(snapshot: Snapshot) -> Heartbeat | None:
    """Give the heartbeat of the thread that trains: it steps, or else calls the most modules."""
    return max(snapshot.heartbeats, key=lambda one: (one.step, one.events), default=None)


def step_s(snapshot: Snapshot) -> float:
    """Give the usual time of a step: the mean, or the bound below which half of them lie where that is less."""
    family = _family(snapshot, "hookd_step_seconds")
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
    """Give a number that stands for the names of all modules and their order."""
    return zlib.crc32("\n".join(snapshot.modules[key].name for key in sorted(snapshot.modules)).encode())


def _state(pid: int) -> str:
    try:
        return proc.status(pid).state
    except (HookdError, OSError, LookupError, ValueError):
        return ""


def _family(snapshot: Snapshot, name: str) -> Family | None:
    return next((family for family in snapshot.families if family.name == name), None)


def _value(snapshot: Snapshot, name: str) -> float:
    """Give the first number of a family; 0 where there is none, or none that can be compared."""
    family = _family(snapshot, name)
    value = float(family.cells[family.first[0]]) if family is not None and family.first else 0.0
    return value if math.isfinite(value) else 0.0


def _issued(snapshot: Snapshot) -> Mapping[str, float]:
    """Give by group how many collectives the rank has issued; what stands there is the target's own word."""
    family = _family(snapshot, "hookd_collectives_issued")
    if family is None or family.labels != ("group",):
        return {}
    pairs = zip(family.values[:MAX_GROUPS], family.first[:MAX_GROUPS], strict=True)
    cells = ((values[0], float(family.cells[first])) for values, first in pairs)
    return {group: value for group, value in cells if math.isfinite(value) and _GROUP.fullmatch(group)}
