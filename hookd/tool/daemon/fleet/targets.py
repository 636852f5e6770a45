"""One target as the daemon sees it: its page, its pulse, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from hookd.errors import HookdError, NoSuchTarget, PageError
from hookd.tool.attach import container, control, discover
from hookd.tool.daemon.fleet import curve
from hookd.tool.daemon.fleet.deaths import LAST, Witness, judge
from hookd.tool.daemon.fleet.identity import OF_THE_KERNEL, Identity, text
from hookd.tool.daemon.fleet.usage import Usage, usage_of
from hookd.tool.daemon.incidents.incident_log import Herald
from hookd.tool.linux import bounded, proc
from hookd.tool.linux.waiter import WAITERS
from hookd.tool.reports.collapse import same
from hookd.wire import labels
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hookd.tool.attach import Control
    from hookd.tool.daemon.fleet.deaths import Death
    from hookd.wire.incident import Incident
    from hookd.wire.page import Heartbeat, Record, Snapshot
    from hookd.wire.report import CurvePoint
    from hookd.wire.target import Hang, Ongoing

_log = logging.getLogger(__name__)

DEATH_S, REMOVAL_S = 2.0, 0.2
_MOST_REMOVALS = 20
"""How long may be asked how a process has ended, and for the socket that it has left behind: many may end at one moment."""
State = Literal["attached", "lost", "corrupt", "detached"]
STATES: tuple[State, ...] = ("attached", "lost", "corrupt", "detached")
"""Served and alive; the process is gone; the page cannot be trusted; the agent has left."""


class Pulse:
    """When a target last made an event, by the daemon's own clock: the hot path of the target reads none."""

    def __init__(self, now: float) -> None:
        self._seen: Mapping[int, tuple[object, ...]] = {}
        self._changed = now

    def see(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Compare with what was seen before, about once a second and at each scrape; inside a call the module changes."""
        places = {beat.tid: (beat.module, beat.events, beat.phase, beat.step) for beat in beats}
        if any(self._seen.get(tid, (0, 0, "other", 0)) != place for tid, place in places.items()):
            self._changed = now
        self._seen = places

    def age_s(self, now: float) -> float:
        """Give the seconds since the last change that was seen."""
        return max(0.0, now - self._changed)


@dataclass
class Ended:
    """How a target ended.

    Attributes:
        reason: a word or two, see `deaths.Death`; "detached", or why its page is not trusted.
        at: by the monotonic clock.
        death: all that is known, where the process is gone.
    """

    reason: str
    at: float
    death: Death | None = None
    time: float = field(default_factory=time.time)


class Target:
    """A process that holds a page. Its methods may be called from any thread.

    Attributes:
        pid: as the daemon sees it.
        start_ticks: field 22 of its /proc/PID/stat; with the pid it names the process.
        page: device and inode of the page's memfd, which tell one attach from the next.
        claim: the run and rank that it is served under.
        state: one of STATES.
        ended: how it ended, None while it is attached.
        pidfd: readable once the process is gone; -1 where the kernel has none, and after the end.
        lease: an open connection to the agent while this daemon holds it.
        container: the pod and container it runs in.
        looked_at: monotonic seconds of when the fleet last looked at it.
        incidents_stored: the highest number of an incident of its page that was read.
        repairs: those of the store since when that number holds.
        incidents_dropped: how many of its incidents were too many, see `admission`.
        told: by kind, how many incidents daemons have seen themselves, see `Fleet.tell`.
        ongoing: by kind, when and in which words those were told that are not over; replaced, never changed.
        hang: while it hangs, where it stands and who waits for whom (`hookd.tool.daemon.watch.hangs`); replaced, never changed.
    """

    def __init__(self, pid: int, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over the page's descriptor `fd`. A page that cannot be trusted makes a target in state "corrupt"."""
        self.pid = pid
        self.start_ticks = proc.start_ticks(pid)
        self.page = page_id(fd)
        self.state: State = "attached"
        self.ended: Ended | None = None
        self.looked_at = 0.0
        self.incidents_stored = 0
        self.repairs = 0
        self.incidents_dropped = 0
        self.told: dict[str, int] = {}
        self.ongoing: dict[str, Ongoing] = {}
        self.hang: Hang | None = None
        self.herald = Herald(clock)
        self.lease: Control | None = None
        self.container = container.of_process(pid)
        self.pidfd = _pidfd(pid)
        self._clock = clock
        self._pulse = Pulse(clock())
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._distinct: tuple[list[Incident], int] = ([], 0)
        self._curve: list[CurvePoint] = []
        self._usage = Usage()
        self._leftover, self._removals = (
            "",
            0,
        )  # the socket file of an agent that was killed, and how often it is still tried
        self.witness = Witness(pid, self.start_ticks)
        self._number = -1  # of the page among the target's descriptors, where it was seen last
        self._page_owner = frozenset({os.fstat(fd).st_uid})
        self._reader: PageReader | None = None
        self._told: Mapping[str, Any] = {}
        try:
            self._reader = PageReader(fd)
            self._snapshot = self._reader.read()
            self._told = self._snapshot.identity
            self.identity = Identity.of_page(self._told, pid=pid)
        except PageError as exc:
            self.identity = Identity.of_process(pid)
            self._close("corrupt", exc.reason)
        self._files = proc.link(pid, "ns/mnt")
        identity = self.identity
        self.claim = labels.Claim(pid, pid, identity.rank, identity.run, identity.run, uid=identity.uid)

    def read(self) -> Snapshot | None:
        """Copy the page; of a target that has ended, the last copy. None when there never was a good one."""
        with self._lock:
            self._refresh()
            return self._snapshot

    def curve(self) -> list[CurvePoint]:
        """Give the times of its last steps, see `curve.of`; of a target that has ended, as they stood at its end."""
        with self._lock:
            self._draw()
            return self._curve

    def _draw(self) -> None:
        if self._reader is not None:
            with contextlib.suppress(PageError):
                self._curve = curve.of(self._reader.records())

    def distinct_incidents(self) -> int:
        """Return how many incidents its page has, of equal ones one."""
        incidents = [] if self._snapshot is None else self._snapshot.incidents
        if self._distinct[0] is not incidents:  # a reader gives the same list while nothing new is told
            self._distinct = (incidents, len({same(one) for one in incidents}))
        return self._distinct[1]

    def last(self) -> Snapshot | None:
        """Give the copy that was made last, without making one."""
        return self._snapshot

    def reidentify(self) -> Identity:
        """Give the identity anew where the last copy of the page says another."""
        if self._snapshot is not None and self._snapshot.identity != self._told:
            self._told = self._snapshot.identity
            found = Identity.of_page(self._told, pid=self.pid)
            # Once it has ended, what the kernel says of the pid is of nobody, or of another process.
            if found.uid < 0 or not proc.is_same(self.pid, self.start_ticks):
                found = replace(found, **{name: getattr(self.identity, name) for name in OF_THE_KERNEL})
            self.identity = found
        return self.identity

    @property
    def was_sent_away(self) -> bool:
        """Whether its agent was told to go, and has not left by itself: a lease that ended, an attach that failed."""
        told = self._snapshot.identity.get("sent_away") if self._snapshot is not None else None
        return told is True and self.ended is not None and self.ended.reason == "detached"

    def poll(self) -> None:
        """Look at page and process; notices a detach, and a death where there is no pidfd."""
        with self._lock:
            self._refresh()
            if self.ended is None:
                self._usage = usage_of(self.pid, self._usage)
        if self.ended is None and self.pidfd < 0 and not self.is_running():
            self.lose()

    def lose(self) -> None:
        """Take the last copy of the page: the process is gone, or is another program now."""
        with WAITERS.within(DEATH_S), self._lock:
            self._refresh()
            self._draw()
            if self.ended is None or self.state == "corrupt":
                death = judge(self.witness.gather(self.pidfd), self._snapshot, self._recent())
                self._close("lost", death.reason, death)
            if self._snapshot is not None:
                self._leftover, self._removals = text(self._snapshot.identity, "control"), _MOST_REMOVALS
                self.tidy()

    def tidy(self) -> None:
        """Remove the socket file that is left of an agent which was killed; again where there was no time for it before."""
        if not self._removals:
            return
        self._removals -= 1
        with WAITERS.within(REMOVAL_S):
            if control.remove_dead(self._leftover, self.identity.process_uid, near=self._neighbour()) is not None:
                self._removals = 0

    def _neighbour(self) -> int | None:
        """Give who sees the same files, as we may not: its parent, in a container that outlives it, or the first process."""
        return next((pid for pid in (self.identity.ppid, 1) if pid and proc.link(pid, "ns/mnt") == self._files), None)

    def detach(self) -> None:
        """Take the last copy of the page: its agent has left."""
        with self._lock:
            self._refresh()
            self._draw()
            self._close("detached", "detached")

    def spoil(self) -> None:
        """Trust the page no more."""
        with self._lock:
            self._close("corrupt", "corrupt")

    def holds_page(self) -> bool:
        """Whether a descriptor of the process has the name of its page: nothing is opened. It is sought among all of them.

        Raises:
            AttachError: reason "unreadable", they were not told in time.
        """
        self._number = next(iter(self._numbers()), -1)
        return self._number >= 0

    def has_page_open(self) -> bool:
        """Whether the process has the memory file of its page open, whatever is in it; a child looks, see `bounded`.

        Raises:
            AttachError: reason "unreadable", it did not answer in time.
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
        self._pulse.see(self._snapshot.heartbeats, self._clock())
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
        """Tell whether the very process still runs (a zombie does not); one that cannot be looked at now counts as running."""
        try:
            return proc.is_running(self.pid, self.start_ticks)
        except OSError as exc:
            return exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
        except HookdError:
            return False

    def heartbeat_age_s(self) -> float | None:
        """Give the seconds since its last event, None once it has ended."""
        return None if self.ended is not None else self._pulse.age_s(self._clock())

    def usage(self) -> Usage:
        """Give what the operating system counts for it; after its end, the last."""
        with self._lock:
            if self.ended is None:
                self._usage = usage_of(self.pid, self._usage)
            return self._usage

    def take_lease(self, lease: Control) -> bool:
        """Keep this open connection as our lease; False if there is one already, or nothing to hold any more."""
        with self._lock:
            if self.lease is not None or self.ended is not None:
                return False
            self.lease = lease
            return True

    def release(self) -> None:
        """Give up the lease on the agent, if there is one."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Close what is open; the agent stays as it is. Nobody may watch the pidfd any more."""
        self.release()
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def without_page(user: int, targets: Sequence[Target]) -> Iterator[Target]:
    """Yield those of a user's targets that have no descriptor with the name of a page any more.

    Where each had it is looked at for all of them together: it costs some 5 us for each.

    Raises:
        AttachError: reason "unreadable", one of them did not answer in time.
    """
    names = bounded.links(user, [f"{target.pid}/fd/{target._number}" for target in targets])  # noqa: SLF001  of this module
    for target, name in zip(targets, names, strict=True):
        if not name.startswith(discover.PAGE_LINK) and not target.holds_page():
            yield target


def page_id(fd: int) -> tuple[int, int]:
    """Tell one page from another: device and inode of its memory file."""
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino)


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an old kernel, a sandbox; poll() then looks at /proc
        return -1
