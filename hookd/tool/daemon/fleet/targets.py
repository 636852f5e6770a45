"""One target as the daemon sees it: its page, its pulse, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from hookd.errors import HookdError, NoSuchTarget, PageError
from hookd.tool.attach import container, control, discover
from hookd.tool.daemon.fleet import curve
from hookd.tool.daemon.fleet.deaths import LAST, EvidenceReader, judge
from hookd.tool.daemon.fleet.identity import OF_THE_KERNEL, Identity, text
from hookd.tool.daemon.fleet.usage import Usage, usage_of
from hookd.tool.daemon.incidents.incident_log import IncidentLog
from hookd.tool.linux import bounded, proc
from hookd.tool.linux.waiter import WAITERS
from hookd.tool.reports.collapse import same
from hookd.wire import labels
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hookd.tool.attach import Control
    from hookd.tool.daemon.fleet.deaths import Death
    from hookd.wire.identity import Identity as PageIdentity
    from hookd.wire.incident import Incident
    from hookd.wire.page import Heartbeat, Record, Snapshot
    from hookd.wire.report import CurvePoint
    from hookd.wire.target import Hang, Ongoing

_log = logging.getLogger(__name__)

DEATH_S, REMOVAL_S = 2.0, 0.2
_MOST_REMOVALS = 20
"""Limits for finding out how a process ended, and for removing the socket that it has left: seconds, and attempts.

Many processes may end at the same time.
"""
State = Literal["attached", "ended", "lost", "corrupt", "detached"]
STATES: tuple[State, ...] = ("attached", "ended", "lost", "corrupt", "detached")
"""In this order: served and alive; the process has ended by itself without an error; it is gone otherwise; the page cannot be
trusted; the agent has left."""
GONE: frozenset[State] = frozenset({"ended", "lost"})
"""States in which the process is gone."""


class Activity:
    """When a target last made an event, by the daemon's own clock. The target's hot path does not read a clock.

    Attributes:
        time: Unix seconds of the last observed change; at first, those of the beginning.
    """

    def __init__(self, now: float) -> None:
        self._seen: Mapping[int, tuple[object, ...]] = {}
        self._changed = now
        self.time = time.time()

    def see(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Compare heartbeats with the previous ones, about once a second and at each scrape.

        Within a call the module changes.
        """
        places = {beat.tid: (beat.module, beat.events, beat.phase, beat.step) for beat in beats}
        if any(self._seen.get(tid, (0, 0, "other", 0)) != place for tid, place in places.items()):
            self._changed, self.time = now, time.time()
        self._seen = places

    def age_s(self, now: float) -> float:
        """Return the seconds since the last observed change."""
        return max(0.0, now - self._changed)


@dataclass
class Ended:
    """How a target ended.

    Attributes:
        reason: a word or two, see `deaths.Death`; "detached", or why its page is not trusted.
        at: by the monotonic clock.
        death: all known facts, if the process is gone.
    """

    reason: str
    at: float
    death: Death | None = None
    time: float = field(default_factory=time.time)


class Target:
    """A process that has a page.

    Its methods may be called from any thread.

    Attributes:
        pid: as the daemon sees it.
        start_ticks: field 22 of its /proc/PID/stat; together with the pid it identifies the process.
        page: device and inode of the page's memfd, which distinguish one attach from the next.
        claim: the run and rank that it is served under.
        state: one of STATES.
        ended: how it ended, None while it is attached.
        pidfd: readable once the process is gone; -1 if the kernel has none, and after the end.
        lease: an open connection to the agent while this daemon holds it.
        container: the pod and container it runs in.
        polled_at: monotonic seconds of the fleet's last poll of it.
        incidents_stored: the highest number of an incident of its page that was read.
        repairs: number of the store's repairs for which `incidents_stored` holds.
        incidents_dropped: number of its incidents beyond the limits, see `admission`.
        reported: by kind, the number of incidents that daemons themselves have seen, see `Fleet.report`.
        ongoing: by kind, time and message of incidents that are not over; replaced, never changed.
        hang: while it hangs, where it stands and which rank waits for which (`hookd.tool.daemon.watch.hangs`); replaced, never
            changed.
    """

    def __init__(self, pid: int, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over the page's descriptor `fd`. A page that cannot be trusted makes a target in state "corrupt"."""
        self.pid = pid
        self.start_ticks = proc.start_ticks(pid)
        self.page = page_id(fd)
        self.state: State = "attached"
        self.ended: Ended | None = None
        self.polled_at = 0.0
        self.incidents_stored = 0
        self.repairs = 0
        self.incidents_dropped = 0
        self.reported: dict[str, int] = {}
        self.ongoing: dict[str, Ongoing] = {}
        self.hang: Hang | None = None
        self.incident_log = IncidentLog(clock)
        self.lease: Control | None = None
        self.container = container.of_process(pid)
        self.pidfd = _pidfd(pid)
        self._clock = clock
        self._activity = Activity(clock())
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._distinct: tuple[list[Incident], int] = ([], 0)
        self._curve: list[CurvePoint] = []
        self._usage = Usage()
        self._leftover = ""  # the socket file of an agent that was killed
        self._removals = 0  # number of attempts left to remove it
        self.evidence = EvidenceReader(pid, self.start_ticks)
        self._number = -1  # of the page among the target's descriptors, as of the last poll
        self._page_owner = frozenset({os.fstat(fd).st_uid})
        self._reader: PageReader | None = None
        self._raw_identity: PageIdentity = {}
        try:
            self._reader = PageReader(fd)
            self._snapshot = self._reader.read()
            self._raw_identity = self._snapshot.identity
            self.identity = Identity.of_page(self._raw_identity, pid=pid)
        except PageError as exc:
            self.identity = Identity.of_process(pid)
            self._close("corrupt", exc.reason)
        self._files = proc.link(pid, "ns/mnt")
        identity = self.identity
        self.claim = labels.Claim(pid, pid, identity.rank, identity.run, identity.run, uid=identity.uid)

    def read(self) -> Snapshot | None:
        """Copy the page.

        Returns:
            The new copy; the last one if the target has ended; None if there never was a good one.
        """
        with self._lock:
            self._refresh()
            return self._snapshot

    def curve(self) -> list[CurvePoint]:
        """Return the times of the last steps, see `curve.of`.

        For a target that has ended these are the steps before its end.
        """
        with self._lock:
            self._draw()
            return self._curve

    def recent(self, count: int) -> list[Record]:
        """Return about the last `count` events of the recorder; none after the end."""
        with self._lock:
            if self._reader is not None:
                with contextlib.suppress(PageError):
                    return self._reader.recent(count)
            return []

    def _draw(self) -> None:
        if self._reader is not None:
            with contextlib.suppress(PageError):
                self._curve = curve.of(self._reader.records())

    def distinct_incidents(self) -> int:
        """Return the number of incidents of the page, counting equal ones once."""
        incidents = [] if self._snapshot is None else self._snapshot.incidents
        if self._distinct[0] is not incidents:  # a reader returns the same list until there is a new incident
            self._distinct = (incidents, len({same(incident) for incident in incidents}))
        return self._distinct[1]

    def last(self) -> Snapshot | None:
        """Return the last copy of the page, without making a new one."""
        return self._snapshot

    def reidentify(self) -> Identity:
        """Return the identity, updated if the last copy of the page has another one."""
        if self._snapshot is not None and self._snapshot.identity != self._raw_identity:
            self._raw_identity = self._snapshot.identity
            identity = Identity.of_page(self._raw_identity, pid=self.pid)
            if identity.world_size == self.identity.world_size:  # its launcher may have gone meanwhile
                identity = replace(identity, job=self.identity.job)
            # After the end the kernel knows nothing about the pid, or it belongs to another process.
            if identity.uid < 0 or not proc.is_same(self.pid, self.start_ticks):
                identity = replace(identity, **{name: getattr(self.identity, name) for name in OF_THE_KERNEL})
            self.identity = identity
        return self.identity

    @property
    def was_sent_away(self) -> bool:
        """Whether the agent was asked to leave, and has not left by itself.

        It leaves by itself after a lease that ended, or an attach that failed.
        """
        sent_away = self._snapshot.identity.get("sent_away") if self._snapshot is not None else None
        return sent_away is True and self.ended is not None and self.ended.reason == "detached"

    def poll(self) -> None:
        """Look at page and process. This notices a detach, and a death if there is no pidfd."""
        with self._lock:
            self._refresh()
            if self.ended is None:
                self._usage = usage_of(self.pid, self._usage)
        if self.ended is None and self.pidfd < 0 and not self.is_running():
            self.lose()

    def lose(self) -> None:
        """Take the last copy of the page. The process is gone, or runs another program."""
        with WAITERS.within(DEATH_S), self._lock:
            self._refresh()
            self._draw()
            if self.ended is None or self.state == "corrupt":
                death = judge(self.evidence.read(self.pidfd), self._snapshot, self._recent())
                self._close("lost" if death.is_incident else "ended", death.reason, death)
            if self._snapshot is not None:
                self._leftover, self._removals = text(self._snapshot.identity, "control"), _MOST_REMOVALS
                self.tidy()

    def tidy(self) -> None:
        """Remove the socket file of an agent that was killed. Later calls try again if there was not enough time."""
        if not self._removals:
            return
        self._removals -= 1
        with WAITERS.within(REMOVAL_S):
            if control.remove_dead(self._leftover, self.identity.process_uid, near=self._neighbour()) is not None:
                self._removals = 0

    def _neighbour(self) -> int | None:
        """Return a process that sees the same files, because we may not.

        This is the parent, in a container that outlives the target, or the first process.
        """
        return next((pid for pid in (self.identity.ppid, 1) if pid and proc.link(pid, "ns/mnt") == self._files), None)

    def detach(self) -> None:
        """Take the last copy of the page: the agent has left."""
        with self._lock:
            self._refresh()
            self._draw()
            self._close("detached", "detached")

    def mark_corrupt(self) -> None:
        """Stop trusting the page."""
        with self._lock:
            self._close("corrupt", "corrupt")

    def holds_page(self) -> bool:
        """Whether any descriptor of the process has the name of its page.

        No descriptor is opened.

        Raises:
            AttachError: reason "unreadable", the descriptors could not be listed in time.
        """
        self._number = next(iter(self._numbers()), -1)
        return self._number >= 0

    def has_page_open(self) -> bool:
        """Whether the process has the memory file of its page open, whatever it contains.

        A child process looks, see `bounded`.

        Raises:
            AttachError: reason "unreadable", there was no answer in time.
        """
        return any(map(self._is_page, self._numbers()))

    def _numbers(self) -> list[int]:
        try:
            return discover.numbers_of_pages(self.pid)
        except (NoSuchTarget, OSError):
            return []

    def _is_page(self, number: int) -> bool:
        try:
            fd = bounded.open_memory_file(self.pid, number, self._page_owner)
        except OSError:
            return False
        try:
            return page_id(fd) == self.page
        finally:
            os.close(fd)

    def _refresh(self) -> None:
        if self._reader is None or self.ended is not None:
            return
        try:
            self._snapshot = self._reader.read()
        except PageError as exc:
            self._close("corrupt", exc.reason)
            return
        self._activity.see(self._snapshot.heartbeats, self._clock())
        if self._snapshot.state == "detached":
            self._close("detached", "detached")

    def _recent(self) -> list[Record]:
        try:
            return self._reader.recent(LAST) if self._reader is not None else []
        except PageError as exc:
            _log.info("target %d: no last events: %s", self.pid, exc)
            return []

    def _close(self, state: State, reason: str, death: Death | None = None) -> None:
        if self.ended is None or self.state == "corrupt":
            self.state = state
            self.ended = Ended(reason, self._clock(), death)
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def is_running(self) -> bool:
        """Whether this very process still runs; a zombie does not.

        A process that cannot be read at the moment counts as running.
        """
        try:
            return proc.is_running(self.pid, self.start_ticks)
        except OSError as exc:
            return exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
        except HookdError:
            return False

    def heartbeat_age_s(self) -> float | None:
        """Return the seconds since the last event; None after the end."""
        return None if self.ended is not None else self._activity.age_s(self._clock())

    def heartbeat_time(self) -> float | None:
        """Return the Unix seconds of the last event; None after the end."""
        return None if self.ended is not None else self._activity.time

    def usage(self) -> Usage:
        """Return the operating system's counts; after the end, the last ones."""
        with self._lock:
            if self.ended is None:
                self._usage = usage_of(self.pid, self._usage)
            return self._usage

    def take_lease(self, lease: Control) -> bool:
        """Keep this open connection as our lease.

        Returns:
            False if there is one already, or the target has ended.
        """
        with self._lock:
            if self.lease is not None or self.ended is not None:
                return False
            self.lease = lease
            return True

    def release(self) -> None:
        """Close the lease on the agent, if there is one."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Close everything that is open; the agent stays as it is. Nobody may watch the pidfd any more."""
        self.release()
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def without_page(user: int, targets: Sequence[Target]) -> Iterator[Target]:
    """Yield those of a user's targets without any descriptor named as a page.

    Their last known descriptors are read in one go, at about 5 us each.

    Raises:
        AttachError: reason "unreadable", one of them did not answer in time.
    """
    names = bounded.links(user, [f"{target.pid}/fd/{target._number}" for target in targets])  # noqa: SLF001  of this module
    for target, name in zip(targets, names, strict=True):
        if not name.startswith(discover.PAGE_LINK) and not target.holds_page():
            yield target


def page_id(fd: int) -> tuple[int, int]:
    """Return what identifies a page: device and inode of its memory file."""
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel, a sandbox; poll() then looks at /proc
        return -1
