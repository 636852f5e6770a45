"""All targets of this daemon: found by their pages, looked at once a second, kept a while after their end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
import weakref
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from hookd.errors import AttachError, HookdError, NoSuchTarget
from hookd.tool.attach.census import INSPECTION_S, Census
from hookd.tool.attach.discover import find_page
from hookd.tool.daemon.fleet.deaths import Memories
from hookd.tool.daemon.fleet.fd_budget import PER_USER, Room
from hookd.tool.daemon.fleet.targets import Target, page_id, without_page
from hookd.tool.daemon.incidents.admission import MOST_COUNTED, Admission, Source
from hookd.tool.daemon.incidents.incident_log import who
from hookd.tool.daemon.incidents.store import END
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import Budget, account_of
from hookd.tool.linux.owner import user_name
from hookd.tool.linux.waiter import WAITERS
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.daemon.fleet.identity import Identity
    from hookd.tool.daemon.fleet.last_session import Held
    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.wire.incident import Incident, IncidentRow

LOOK_S = 0.5
"""How long one poll may look at the targets of one user, and one scan take in those that are new."""
_LAUNCHER = "launcher"
"""The rank of a process that only starts ranks."""
_log = logging.getLogger(__name__)


class Fleet:
    """The targets. Methods block on /proc and on pages: call them from threads, any number at once.

    Args:
        store: where incidents go.
        linger_s: how long an ended target's last counters are served.
        only: the pids that may be targets; None for every process.
        per_user: so many living targets of one user are served, and as many that linger.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: IncidentStore,
        *,
        linger_s: float,
        only: Collection[int] | None = None,
        per_user: int = PER_USER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.admission = Admission(store, clock)
        self._linger_s = linger_s
        self._only = only
        self._census = Census(only, clock)
        self._memories = Memories(clock)
        self._clock = clock
        self._room = Room(per_user)
        self._lock = threading.RLock()
        self._keeping = threading.Lock()
        self._held: dict[int, Target] = {}
        self._ended: list[Target] = []
        self._reserved: dict[int, labels.Claim] = {}
        self._reserved_until = 0.0
        self._seen: set[tuple[int, int]] = set()
        self._failing: weakref.WeakSet[Target] = weakref.WeakSet()
        self._is_closed = False

    def targets(self) -> list[Target]:
        """Give all targets that are served, the living and those that linger, by pid."""
        with self._lock:
            return sorted([*self._held.values(), *self._ended], key=lambda target: target.pid)

    def incidents(self, **wanted: Any) -> list[IncidentRow]:
        """Give incidents from the store, see `incidents.query`; of a daemon for certain pids those of its targets."""
        with self._lock:
            processes = None if self._only is None else frozenset(self._seen)
        return self.store.query(processes, **wanted)

    def forget(self, age_s: float) -> None:
        """Forget incidents of this age: before the newest one, so that a clock that is set ahead does not empty the store."""
        newest = self.store.query(limit=1)
        if newest:
            self.store.prune(min(time.time(), newest[0]["last"]) - age_s)

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
        with self._lock:
            served = Counter(one.identity.uid for one in self._held.values())
        for pid in self._room.reopened(served):
            self._census.recheck(pid)
        found = self._census.look()
        with self._lock:
            held = list(self._held.values())
        # An agent that leaves and a program that is replaced let go of the page; in the others nothing is to be found.
        pids = self._without_page(held)
        pids += [one.pid for one in found if one.state == "attached" and one.pid not in pids]
        return self._adopt_in_turn(pids), found

    def _without_page(self, held: list[Target]) -> list[int]:
        """Find the targets that hold their page no more; a user's take LOOK_S at most, in another order each time."""
        of_user: defaultdict[int, list[Target]] = defaultdict(list)
        random.shuffle(held)
        for target in held:
            of_user[target.identity.uid].append(target)
        found = []
        for user, targets in of_user.items():
            until = self._clock() + LOOK_S
            with contextlib.suppress(AttachError):  # of this user nothing is known now
                for target in without_page(user, targets):
                    found.append(target.pid)
                    if self._clock() > until:
                        break
        return sorted(found)

    def _adopt_in_turn(self, pids: Sequence[int]) -> list[Target]:
        """Make targets of those that hold pages. A user's take LOOK_S at most; the rest waits for the next scan."""
        budget, new = Budget(LOOK_S, self._clock), []
        for pid in pids:
            user = account_of(pid)
            if budget.is_over(user):
                self._census.recheck(pid)
                continue
            with budget.of(user), WAITERS.within(INSPECTION_S):
                if (target := self.adopt(pid)) is not None:
                    new.append(target)
        return new

    def adopt(self, pid: int) -> Target | None:
        """Make a target of a process that holds a page; None if it holds none, is one already, or may not be seen."""
        try:
            ticks = proc.start_ticks(pid)  # before the page is opened, and compared when all has been read
            fd = find_page(pid)
        except (HookdError, OSError) as exc:
            self._try_again(pid, exc)
            return None
        try:
            spoilt = self._spoilt(pid, fd)
        except AttachError as exc:  # whether it has its page open is not known yet
            self._try_again(pid, exc)
            if fd is not None:
                os.close(fd)
            return None
        with self._lock:
            known = self._held.get(pid)
            if fd is None:
                self._room.forget(pid)
                if known is not None and known.ended is None:
                    self._left(known, is_spoilt=known is spoilt)
                return None
            if self._is_closed or (known is not None and known.page == page_id(fd)):
                os.close(fd)
                return None
            if known is not None:
                self._left(known, is_spoilt=known is spoilt)
        if not self._has_room(pid, fd):
            os.close(fd)
            return None
        return self._take(pid, fd, ticks)

    def _spoilt(self, pid: int, fd: int | None) -> Target | None:
        """Return the target of a process that has its page open, which no longer is a good one: `fd` is another page, or none.

        To look may take a second: not under the lock.
        """
        with self._lock:
            known = self._held.get(pid)
        if known is None or known.ended is not None or (fd is not None and known.page == page_id(fd)):
            return None
        return known if known.has_page_open() and proc.has_memory(pid) else None

    def _has_room(self, pid: int, fd: int) -> bool:
        uid = account_of(pid)
        if self._count(uid) >= self._room.per_user:
            self._room.refuse_user(pid, uid)
            return False
        if not self._room.has(fd):
            self._room.refuse(pid)
            return False
        return True

    def _count(self, uid: int) -> int:
        with self._lock:
            return sum(1 for one in self._held.values() if one.identity.uid == uid)

    def require_room(self, pid: int) -> None:
        """Refuse to take one more process of a user who has as many targets as a user may have.

        Raises:
            HookdError: reason "no-room".
        """
        uid = account_of(pid)
        with self._lock:
            is_served = pid in self._held
        if not is_served and self._count(uid) >= self._room.per_user:
            raise HookdError(
                f"process {pid} cannot be served: user {user_name(uid)} has {self._room.per_user} targets already",
                reason="no-room", hint="targets_per_user under [serve] in the configuration of the daemon allows more.",
            )  # fmt: skip

    def _read(self, pid: int, fd: int, ticks: int) -> Target | None:
        try:
            target = Target(pid, fd, self._clock)
        except (HookdError, OSError) as exc:  # it ended while we looked at it
            _log.info("process %d: %s", pid, exc)
            self._try_again(pid, exc)
            with contextlib.suppress(OSError):
                os.close(fd)
            return None
        is_same = target.start_ticks == ticks and proc.is_same(target.pid, ticks)
        snapshot = target.last()
        if is_same and (snapshot is None or snapshot.state != "detached"):
            return target
        # The pid is another process's by now: the page must not pass for that one's, or its user's. Or the agent lets go of its page
        # next: it was found a moment after its target had ended by that, and is not to be served as one that is attached.
        target.close()
        self._census.recheck(pid)
        return None

    def _try_again(self, pid: int, exc: Exception) -> None:
        """Have a process looked at again whose page could not be read for a reason that passes."""
        if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
            self._room.refuse(pid)
        elif isinstance(exc, HookdError) and exc.reason == "unreadable":
            self._census.recheck(pid)

    def _take(self, pid: int, fd: int, ticks: int) -> Target | None:
        target = self._read(pid, fd, ticks)  # of a large page that takes seconds: nobody waits for it
        return None if target is None else self._add(target)

    def _add(self, target: Target) -> Target | None:
        pid = target.pid
        with self._lock:
            known = self._held.get(pid)
            if self._is_closed or (known is not None and known.page == target.page):  # another thread was quicker
                target.close()
                return None
            self._make_way(target.identity)
            target.claim = self.claim(target.identity, pid)
            self._take_over(target.claim)
            self._held[pid] = target
            self._room.forget(pid)
            self._reserved.pop(pid, None)
            if self._only is not None:
                self._seen.add((pid, target.start_ticks))
        target.witness.memory = self._memories.of(pid)
        self.catch_up(target)
        target.incidents_stored = self.store.seen(self._key(target))
        self._keep_incidents(target)
        _log.info("found an agent %s", who(target))
        return target

    def claim(self, identity: Identity, pid: int) -> labels.Claim:
        """Settle the run and rank of a process that is, or is about to become, a target.

        A run is of one user: whoever has a name first keeps it, until the last target of that name is served no more. A
        process that an earlier daemon has served keeps its name.
        """
        uid, meeting = identity.uid, identity.meeting if identity.world_size > 1 else ""
        others = self._claims_beside(pid, uid)
        if (before := self._reserved.get(pid)) is not None and _is_kept(before, identity, others):
            return before
        # Ranks that were started by hand, each from a shell of its own, have no parent in common.
        met = (one.launcher for one in others if meeting and (one.uid, one.meeting) == (uid, meeting))
        job = next(met, labels.launcher(identity.world_size, pid, identity.ppid))
        found = labels.claim(pid, job, identity.rank, identity.run, chosen=identity.is_chosen, others=others, uid=uid)
        found.meeting = meeting
        return found

    def _claims_beside(self, pid: int, uid: int) -> list[labels.Claim]:
        """Return the claims that one more target of a user has to respect."""
        with self._lock:
            held = [other for other in self._held.values() if other.pid != pid]
            # One whose page is corrupt is served, too.
            others = [one for one in held if one.ended is None or one.state == "corrupt" or one.identity.uid != uid]
            # A user's new job takes the place of that user's last one, which lingers; of another user it is not to go.
            lingering = [one.claim for one in self._ended if one.identity.uid != uid]
            if self._clock() >= self._reserved_until:
                self._reserved.clear()
            reserved = [
                one for one in self._reserved.values() if one.pid != pid and (one.uid != uid or proc.size(one.pid))
            ]
        return [*(one.claim for one in others), *lingering, *reserved]

    def reserve(self, claims: Iterable[labels.Claim]) -> None:
        """Keep the names of processes that an earlier daemon has served, for as long as an ended target is served.

        Others may be found before them; and of one that has ended meanwhile the name is not to go to another user at once.
        """
        with self._lock:
            self._reserved = {claim.pid: claim for claim in claims if claim.uid >= 0}
            self._reserved_until = self._clock() + self._linger_s

    def _make_way(self, identity: Identity) -> None:
        """The parent of a rank may have an agent too, under `hookd run`; but it is no rank 0."""
        with self._lock:
            parent = self._held.get(identity.ppid)
            if parent is None or parent.identity.uid != identity.uid:
                return
            if identity.world_size > 1 and parent.identity.world_size == 1:
                old = parent.claim
                parent.claim = labels.Claim(parent.pid, parent.pid, _LAUNCHER, old.wanted, old.run, uid=old.uid)
                self._take_over(parent.claim)

    def _take_over(self, claim: labels.Claim) -> None:
        """Serve no more who lingers under this name: there must be one series of each."""
        with self._lock:
            self._ended = [old for old in self._ended if not _is_same(old.claim, claim)]

    def _left(self, target: Target, *, is_spoilt: bool) -> None:
        """No good page was found in a process that had one: it was detached, is another program now, or spoilt it."""
        snapshot = target.read()
        if target.ended is None and is_spoilt:
            target.spoil()
        if target.state == "corrupt":
            return
        if snapshot is not None and snapshot.state in ("detaching", "detached"):
            target.detach()
        else:
            target.lose()
        self._retire(target)

    def poll(self) -> None:
        """Look at every page and process, and let go of what has lingered long enough.

        A user's targets take LOOK_S at most: beyond that they wait for the next time, for others must not.
        """
        self._memories.look()
        budget = Budget(LOOK_S, self._clock)
        for target in sorted(self.targets(), key=lambda one: one.looked_at):
            owner = target.identity.uid
            if budget.is_over(owner):
                continue  # those are the first next time
            target.looked_at = self._clock()
            try:
                with budget.of(owner):
                    self._see(target)
            except Exception:  # noqa: BLE001  whatever it is, the others are looked at
                if target not in self._failing:
                    self._failing.add(target)
                    _log.exception("target %d cannot be looked at", target.pid)
        with self._lock:
            now = self._clock()
            self._ended = [one for one in self._ended if one.ended is None or now - one.ended.at < self._linger_s]
            ended = list(self._ended)
        for target in ended:
            if not budget.is_over(owner := target.identity.uid):
                with budget.of(owner):
                    target.tidy()
        self.admission.keep({self._key(target) for target in self.targets()})
        self.admission.sum_up()

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
                beside = [one for one in self._ended if one.identity.uid == target.identity.uid]
                if len(beside) > self._room.per_user:
                    self._ended.remove(beside[0])
        target.release()
        self._census.recheck(target.pid)
        self._keep_incidents(target)
        self._tell_end(target)
        if target.was_sent_away:
            self.store.dismiss(target.pid, target.start_ticks)

    def _tell_end(self, target: Target) -> None:
        assert target.ended is not None
        why = "" if target.ended.reason == target.state else f" ({target.ended.reason})"
        _log.info("target %s: %s%s", who(target), target.state, why)
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

        One that is too many of its run or user is dropped, see `admission.LIMITS`.

        Args:
            target: that it is about; or what an earlier daemon has noted of one.
            kind: one word, of a handful: it is a label. What lasts is told by `KIND`, and that it is over by `KIND_over`.
            message: for a person.
            fields: what else is known, as JSON: `step` and `module` have columns of their own, all is kept; `time`
                where it is not now.
        """
        incident = {"time": time.time(), "kind": kind, "message": message, **fields}
        is_new = self.admission.tell(self._source(target), incident)
        if is_new is None:
            return
        if is_new:
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
            if target.repairs != self.store.repairs:
                target.repairs, target.incidents_stored = self.store.repairs, 0
            came = [one for one in snapshot.incidents if _seq(one) > target.incidents_stored]
            new: Sequence[Mapping[str, object]] = ()
            if came:
                new, dropped = self.admission.add(self._source(target), came)
                target.incidents_dropped += dropped + self._missed(target, came)
                target.incidents_stored = max(map(_seq, came))
            target.herald.tell(target, new)
            if target.ended is not None:
                target.herald.end(target)

    def _missed(self, target: Target, came: Sequence[Incident]) -> int:
        """Count those that had to make way on the page since it was last read."""
        gone = min(max(0, _seq(came[0]) - target.incidents_stored - 1), MOST_COUNTED) if target.incidents_stored else 0
        if gone:
            self.admission.missed(self._source(target), gone)
        return gone

    def _source(self, target: Target | Held) -> Source:
        return Source(self._key(target), target.claim, target.claim.uid)

    @staticmethod
    def _key(target: Target | Held) -> tuple[int, int, int]:
        return (target.pid, target.start_ticks, target.page[1])

    def close(self) -> None:
        """Let go of every target; their agents stay as they are."""
        for target in self.targets():
            self._keep_incidents(target)  # the file may just have been mended, without all that pages hold
        self.admission.sum_up(is_last=True)
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


def _is_kept(before: labels.Claim, identity: Identity, others: Iterable[labels.Claim]) -> bool:
    """Tell whether a process is still what it was served as by an earlier daemon, and nobody else has that name."""
    if (before.uid, before.wanted) != (identity.uid, identity.run) or before.rank not in (identity.rank, _LAUNCHER):
        return False
    return all(one.run != before.run or (one.uid == before.uid and one.rank != before.rank) for one in others)


def _is_same(one: labels.Claim, other: labels.Claim) -> bool:
    return (one.run, one.rank) == (other.run, other.rank)


def _seq(incident: Incident) -> int:
    return incident["seq"]
