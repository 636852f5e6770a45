"""A file with the targets of a daemon that has ended.

The next daemon reports which of them have gone meanwhile. Their pages are gone with them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, cast

from hookd.errors import HookdError
from hookd.tool.daemon.incidents.incident_log import IncidentLog
from hookd.tool.daemon.incidents.store import END, boot_id
from hookd.tool.daemon.watch.watcher import Watcher
from hookd.tool.linux import private_file, proc
from hookd.tool.reports.report import describe_steps
from hookd.wire.labels import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target

NAME = "held.json"
NOTE_S = 5.0
"""Interval at which the file is written, in seconds.

The steps in the file may be this old.
"""
MAX_BYTES = 1 << 26
"""Enough for 20,000 targets with the longest possible names."""
_log = logging.getLogger(__name__)


class _Newer(TypedDict, total=False):
    """The fields that an older daemon did not write."""

    uid: int
    wanted: str
    launcher: int
    offset: int
    """The ticks that the daemon's time namespace added to the time since boot."""


class Note(_Newer):
    """A target in the file; `FormerTarget` has the meanings."""

    pid: int
    start_ticks: int
    page: Sequence[int]
    run: str
    rank: str
    seen: float
    step: int
    is_absolute: bool
    boot: str


@dataclass(frozen=True)
class FormerTarget:
    """A target that an earlier daemon has served.

    It has the fields that an incident about it needs.

    Attributes:
        page: device and inode of its page.
        seen: when it was last seen alive, in unix seconds.
        step: the last step that was seen, of the whole run if `is_absolute`, else counted from the attach.
        boot: boot id of the machine.
        uid: owner of the process, -1 if an older daemon has not stored it.
        wanted, launcher: see `labels.Claim`.
    """

    pid: int
    start_ticks: int
    page: tuple[int, int]
    run: str
    rank: str
    seen: float
    step: int
    is_absolute: bool
    boot: str
    uid: int = -1
    wanted: str = ""
    launcher: int = 0
    reported: dict[str, int] = field(default_factory=dict, compare=False)
    incident_log: IncidentLog = field(default_factory=IncidentLog, compare=False)

    @classmethod
    def of(cls, target: Target, boot: str) -> FormerTarget:
        """Return the note of a living target."""
        snapshot = target.last()
        step = None if snapshot is None else describe_steps(snapshot)
        current, is_absolute = (0, False) if step is None else (step["current"], step["is_absolute"])
        claim = target.claim
        return cls(
            target.pid, target.start_ticks, target.page, claim.run, claim.rank, time.time(), current,
            is_absolute, boot, claim.uid, claim.wanted, claim.launcher,
        )  # fmt: skip

    @classmethod
    def from_json(cls, row: Note) -> FormerTarget:
        """Read the result of `as_json`.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        device, inode = row["page"]
        # A daemon in another time namespace has counted from another boot.
        shift = (offset := proc.boot_offset_ticks(os.getpid())) - int(row.get("offset", offset))
        return cls(
            int(row["pid"]), int(row["start_ticks"]) + shift, (int(device), int(inode)), str(row["run"]), str(row["rank"]),
            float(row["seen"]), int(row["step"]), bool(row["is_absolute"]), str(row["boot"]),
            int(row.get("uid", -1)), str(row.get("wanted", row["run"])), int(row.get("launcher", row["pid"])),
        )  # fmt: skip

    def as_json(self) -> Note:
        """Return the note as JSON."""
        noted = {key: value for key, value in vars(self).items() if key not in ("reported", "incident_log")}
        return cast("Note", {**noted, "offset": proc.boot_offset_ticks(os.getpid())})

    @property
    def claim(self) -> Claim:
        """The run and rank that it was served under."""
        return Claim(self.pid, self.launcher, self.rank, self.wanted, self.run, uid=self.uid)

    def is_running(self, boot: str) -> bool:
        """Whether this very process still runs."""
        if self.boot != boot:
            return False
        try:
            return proc.is_running(self.pid, self.start_ticks)
        except HookdError:
            return False
        except OSError:  # it may not be inspected
            return True


class LastSession(Watcher):
    """A watcher that notes which targets are alive.

    It reports once those that have gone since the last daemon.

    Args:
        path: path of the file; None stores nothing.
    """

    def __init__(self, path: Path | None, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._fleet = fleet
        self._clock = clock
        self._boot = boot_id()
        self._members: frozenset[tuple[int, int]] | None = None
        self._before = [] if path is None else _read(path)
        fleet.reserve(target.claim for target in self._before if target.boot == self._boot)
        self._due = 0.0
        self._is_failing = False

    def poll(self, targets: Sequence[Target]) -> None:
        """Report those that have gone, at the first call; write the file.

        It is written if a target has come or gone, or after `NOTE_S`.
        """
        if self._path is None:
            return
        alive = [target for target in targets if target.ended is None]
        members = frozenset((target.pid, target.start_ticks) for target in alive)
        if self._members is None:
            self._report_gone(self._before)
        if members != self._members or self._clock() >= self._due:
            self._members, self._due = members, self._clock() + NOTE_S
            self._write(self._path, [FormerTarget.of(target, self._boot) for target in alive])

    def _report_gone(self, former: Iterable[FormerTarget]) -> None:
        for target in former:
            if target.is_running(self._boot):
                continue  # a target again; or its agent has left meanwhile
            why = "" if target.boot == self._boot else "; the machine has been booted since"
            message = (
                f"process {target.pid} was gone when the daemon came back: last seen alive at {_moment(target.seen)}, how it "
                f"ended is unknown{why}"
            )
            known = {
                "step": target.step,
                "is_step_absolute": target.is_absolute,
                "last_seen": target.seen,
                "reason": "unknown",
            }
            self._fleet.report(target, "lost", message, seq=END, **known)

    def _write(self, path: Path, targets: Sequence[FormerTarget]) -> None:
        """Replace the file as a whole. If the daemon is killed meanwhile, the old one stays."""
        try:
            with private_file.replacing(path, path.with_suffix(".new")) as file:
                file.write(json.dumps([target.as_json() for target in targets]).encode())
            self._is_failing = False
        except OSError as exc:
            if not self._is_failing:
                _log.warning("the next daemon will not know which targets were alive: %s: %s", path, exc)
            self._is_failing = True


def _read(path: Path) -> list[FormerTarget]:
    """Read the last daemon's notes; nothing if the file is damaged."""
    try:
        with path.open("rb") as file:
            return [FormerTarget.from_json(row) for row in json.loads(file.read(MAX_BYTES))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, OverflowError) as exc:
        _log.warning("the targets that were alive when the last daemon ended are unknown: %s: %s", path, exc)
        return []


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
