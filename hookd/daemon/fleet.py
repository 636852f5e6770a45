"""All targets of this daemon: found by their pages, looked at once a second, kept a while after their end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import psutil

from hookd import labels
from hookd.attach.census import Census
from hookd.attach.discover import find_page
from hookd.daemon.deaths import Memories
from hookd.daemon.incidents import END
from hookd.daemon.room import Room
from hookd.daemon.targets import Target, page_id
from hookd.errors import HookdError, NoSuchTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hookd.attach.discover import Candidate
    from hookd.daemon.identity import Identity
    from hookd.daemon.incidents import IncidentStore
    from hookd.daemon.roster import Held

_log = logging.getLogger(__name__)


class Fleet:
    """The targets. Methods block on /proc and on pages: call them from threads, any number at once.

    Args:
        store: where incidents go.
        linger_s: how long an ended target's last counters are served.
        only: the pids that may be targets; None for every process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: IncidentStore,
        *,
        linger_s: float,
        only: Collection[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._linger_s = linger_s
        self._only = only
        self._census = Census(only, clock)
        self._memories = Memories(clock)
        self._clock = clock
        self._room = Room()
        self._lock = threading.RLock()
        self._keeping = threading.Lock()
        self._held: dict[int, Target] = {}
        self._ended: list[Target] = []
        self._seen: set[tuple[int, int]] = set()
        self._failing: weakref.WeakSet[Target] = weakref.WeakSet()
        self._is_closed = False

    def targets(self) -> list[Target]:
        """Give all targets that are served, the living and those that linger, by pid."""
        with self._lock:
            return sorted([*self._held.values(), *self._ended], key=lambda target: target.pid)

    def incidents(self, **wanted: Any) -> list[dict[str, Any]]:
        """Give incidents from the store, see `incidents.query`; of a daemon for certain pids those of its targets."""
        with self._lock:
            processes = None if self._only is None else frozenset(self._seen)
        return self.store.query(processes, **wanted)

    def forget(self, age_s: float) -> None:
        """Forget incidents of this age: before the newest one, so that a clock that is set ahead does not empty the store."""
        newest = self.store.query(limit=1)
        if newest:
            self.store.prune(min(time.time(), newest[0]["time"]) - age_s)

    def get(self, pid: int) -> Target:
        """Give the target of a pid, the living one before one that lingers.

        Raises:
            NoSuchTarget: this process holds no agent that the daemon knows.
        """
        for target in sorted(self.targets(), key=lambda target: target.ended is not None):
            if target.pid == pid:
                return target
        raise NoSuchTarget(
            f"process {pid} is no target of this daemon",
            reason="not-attached",
            hint=f"`hookd attach {pid}` makes it one.",
        )

    def scan(self) -> tuple[list[Target], list[Candidate]]:
        """Look for pages in all processes that may be seen; one call at a time.

        Returns:
            The targets that are new, and the Python processes that are new or have changed.
        """
        for pid in self._room.reopened():
            self._census.recheck(pid)
        found = self._census.look()
        with self._lock:
            held = list(self._held.values())
        # An agent that leaves and a program that is replaced let go of the page; in the others nothing is to be found.
        pids = [target.pid for target in held if not target.holds_page()]
        pids += [one.pid for one in found if one.state == "attached" and one.pid not in pids]
        return [target for pid in pids if (target := self.adopt(pid)) is not None], found

    def adopt(self, pid: int) -> Target | None:
        """Make a target of a process that holds a page; None if it holds none, is one already, or may not be seen."""
        try:
            fd = find_page(pid)
        except (HookdError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EMFILE:
                self._room.refuse(pid)
            return None
        with self._lock:
            known = self._held.get(pid)
            if fd is None:
                self._room.forget(pid)
                if known is not None and known.ended is None:
                    self._left(known)
                return None
            if self._is_closed or (known is not None and known.page == page_id(fd)):
                os.close(fd)
                return None
            if known is not None:
                self._left(known)
            if not self._room.has(fd):
                os.close(fd)
                self._room.refuse(pid)
                return None
            return self._add(pid, fd)

    def _add(self, pid: int, fd: int) -> Target | None:
        try:
            target = Target(pid, fd, self._clock)
        except (HookdError, OSError, psutil.Error) as exc:  # it ended while we looked at it
            _log.info("process %d: %s", pid, exc)
            with contextlib.suppress(OSError):
                os.close(fd)
            return None
        self._make_way(target.identity)
        target.claim = self.claim(target.identity, pid)
        self._take_over(target.claim)
        self._held[pid] = target
        self._room.forget(pid)
        if self._only is not None:
            self._seen.add((pid, target.start_ticks))
        target.witness.memory = self._memories.of(pid)
        self.catch_up(target)
        self._keep_incidents(target)
        _log.info("found an agent in process %d: run %s, rank %s", pid, target.claim.run, target.claim.rank)
        return target

    def claim(self, identity: Identity, pid: int) -> labels.Claim:
        """Settle the run and rank of a process that is, or is about to become, a target."""
        meeting = identity.meeting if identity.world_size > 1 else ""
        with self._lock:
            held = [other for other in self._held.values() if other.pid != pid]
            others = [one.claim for one in held if one.ended is None or one.state == "corrupt"]  # it is served, too
        # Ranks that were started by hand, each from a shell of its own, have no parent in common.
        met = (one.launcher for one in others if meeting and one.meeting == meeting)
        job = next(met, labels.launcher(identity.world_size, pid, identity.ppid))
        found = labels.claim(pid, job, identity.rank, identity.run, chosen=identity.is_chosen, others=others)
        found.meeting = meeting
        return found

    def _make_way(self, identity: Identity) -> None:
        """The parent of a rank may have an agent too, under `hookd run`; but it is no rank 0."""
        with self._lock:
            parent = self._held.get(identity.ppid)
            if identity.world_size > 1 and parent is not None and parent.identity.world_size == 1:
                old = parent.claim
                parent.claim = labels.Claim(parent.pid, parent.pid, "launcher", old.wanted, old.run)
                self._take_over(parent.claim)

    def _take_over(self, claim: labels.Claim) -> None:
        """Serve no more who lingers under this name: there must be one series of each."""
        with self._lock:
            self._ended = [old for old in self._ended if not _is_same(old.claim, claim)]

    def _left(self, target: Target) -> None:
        """No good page was found in a process that had one: it was detached, is another program now, or spoilt it."""
        snapshot = target.read()
        if target.ended is None and target.holds_page():
            target.spoil()
        if target.state == "corrupt":
            return
        if snapshot is not None and snapshot.state in ("detaching", "detached"):
            target.detach()
        else:
            target.lose()
        self._retire(target)

    def poll(self) -> None:
        """Look at every page and process, and let go of what has lingered long enough."""
        self._memories.look()
        for target in self.targets():
            try:
                self._see(target)
            except Exception:  # noqa: BLE001  whatever it is, the others are looked at
                if target not in self._failing:
                    self._failing.add(target)
                    _log.exception("target %d cannot be looked at", target.pid)
        with self._lock:
            now = self._clock()
            self._ended = [one for one in self._ended if one.ended is None or now - one.ended.at < self._linger_s]

    def _see(self, target: Target) -> None:
        if target.ended is None:
            target.poll()
            self._keep_incidents(target)
            self._rename(target)
        elif target.state == "corrupt" and not target.is_running():
            target.lose()
        if target.state == "corrupt":
            self._tell_corrupt(target)
        elif target.ended is not None:
            self._retire(target)

    def _rename(self, target: Target) -> None:
        """Serve a target under what its page says by now: its rank is known once torch.distributed has begun."""
        before = target.identity
        after = target.reidentify()
        if (before.run, before.rank, before.world_size) != (after.run, after.rank, after.world_size):
            self._make_way(after)
            target.claim = self.claim(after, target.pid)
            self._take_over(target.claim)
            _log.info("target %d is now run %s, rank %s", target.pid, target.claim.run, target.claim.rank)

    def lose(self, target: Target) -> None:
        """Take the last copy of a target whose process is gone."""
        target.lose()
        self._retire(target)

    def leave(self, target: Target) -> None:
        """Take the last copy of a target whose agent was told to go."""
        target.detach()
        self._retire(target)

    def _retire(self, target: Target) -> None:
        with self._lock:
            if self._held.get(target.pid) is not target:
                return
            del self._held[target.pid]
            if not any(_is_same(one.claim, target.claim) for one in self._held.values()):
                self._ended.append(target)
        target.release()
        self._census.recheck(target.pid)
        self._keep_incidents(target)
        self._tell_end(target)
        if target.was_sent_away:
            self.store.dismiss(target.pid, target.start_ticks)

    def _tell_end(self, target: Target) -> None:
        assert target.ended is not None
        _log.info("target %d: %s (%s)", target.pid, target.state, target.ended.reason)
        death = target.ended.death
        if death is not None and death.is_incident:
            message = f"process {target.pid} {death.message}"
            self.tell(target, target.state, message, **death.fields, seq=END, time=target.ended.time)

    def _tell_corrupt(self, target: Target) -> None:
        """Tell once, whichever daemon does, that a page is read no more; its process goes on."""
        if target.ended is not None and not target.told.get("corrupt"):
            message = f"the page of process {target.pid} {_SPOILT.get(target.ended.reason, _SPOILT['corrupt'])}"
            self.tell(target, "corrupt", message, reason=target.ended.reason)

    def catch_up(self, target: Target) -> None:
        """Take from the store what daemons have told of a target: earlier ones, and those beside this one."""
        told, target.ongoing = self.store.own(self._key(target))
        target.told |= {kind: max(count, target.told.get(kind, 0)) for kind, count in told.items()}

    def tell(self, target: Target | Held, kind: str, message: str, **fields: Any) -> None:
        """Log an incident that the daemon itself has seen; store and count it, unless another daemon was quicker.

        Args:
            target: that it is about; or what an earlier daemon has noted of one.
            kind: one word, of a handful: it is a label. What lasts is told by `KIND`, and that it is over by `KIND_over`.
            message: for a person.
            fields: what else is known, as JSON: `step` and `module` have columns of their own, all is kept; `time`
                where it is not now.
        """
        incident = {"time": time.time(), "kind": kind, "message": message, **fields}
        if self.store.tell(self._key(target), target.claim.run, target.claim.rank, incident):
            target.told[kind] = target.told.get(kind, 0) + 1
        elif "seq" in fields:
            return  # the end: it is known by now
        if isinstance(target, Target):
            self.catch_up(target)
        with self._keeping:
            target.herald.tell(target, [incident])

    def _keep_incidents(self, target: Target) -> None:
        snapshot = target.last()
        if snapshot is None:
            return
        with self._keeping:  # an end that is noticed and the poll may come at one moment
            new = [one for one in snapshot.incidents if _seq(one) > target.incidents_stored]
            if new:
                self.store.add(self._key(target), target.claim.run, target.claim.rank, new)
                target.incidents_stored = max(map(_seq, new))
            target.herald.tell(target, new)
            if target.ended is not None:
                target.herald.end(target)

    @staticmethod
    def _key(target: Target | Held) -> tuple[int, int, int]:
        return (target.pid, target.start_ticks, target.page[1])

    def close(self) -> None:
        """Let go of every target; their agents stay as they are."""
        with self._lock:
            self._is_closed = True
            for target in self.targets():
                target.close()
            self._held.clear()
            self._ended.clear()


_SPOILT = {
    "corrupt": "cannot be trusted, and is read no more",
    "protocol": "is of another version of hookd, and cannot be read by this one",
}


def _is_same(one: labels.Claim, other: labels.Claim) -> bool:
    return (one.run, one.rank) == (other.run, other.rank)


def _seq(incident: dict[str, object]) -> int:
    seq = incident.get("seq")
    return seq if isinstance(seq, int) else 0
