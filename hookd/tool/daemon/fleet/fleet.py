"""All targets of this daemon.

They are found by their pages, polled once a second, and kept for a while after their end.
"""

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
from hookd.tool.daemon.fleet.deaths import MemoryCgroups
from hookd.tool.daemon.fleet.fd_budget import PER_USER, TargetLimits
from hookd.tool.daemon.fleet.targets import Target, page_id, without_page
from hookd.tool.daemon.incidents.admission import MOST_COUNTED, Admission, Source
from hookd.tool.daemon.incidents.incident_log import who
from hookd.tool.daemon.incidents.store import END
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import TimeLimit, account_of
from hookd.tool.linux.owner import user_name
from hookd.tool.linux.waiter import WAITERS
from hookd.wire import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from typing_extensions import Unpack

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.daemon.fleet.identity import Identity
    from hookd.tool.daemon.fleet.last_session import FormerTarget
    from hookd.tool.daemon.incidents.rows import Query
    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.wire.incident import Incident, IncidentRow

POLL_LIMIT_S = 0.5
"""Time limit per user for one poll of the targets, and for one scan that adds new ones, in seconds."""
_LAUNCHER = "launcher"
"""Rank of a process that only starts ranks."""
_log = logging.getLogger(__name__)


class Fleet:
    """The targets of a daemon.

    The methods block on /proc and on pages: call them from threads, any number at once.

    Args:
        linger_s: how long the last counters of an ended target are served.
        only: the pids that may be targets; None for every process.
        per_user: limit of living targets of one user that are served, and also of those that linger.
        serves_tests: whether the agents of `hookd.testing` are served, which belong to tests and to `hookd plugin check`.
    """

    def __init__(
        self,
        store: IncidentStore,
        *,
        linger_s: float,
        only: Collection[int] | None = None,
        per_user: int = PER_USER,
        serves_tests: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.admission = Admission(store, clock)
        self._linger_s = linger_s
        self._only, self._serves_tests = only, serves_tests
        self._census = Census(only, clock)
        self._memory_cgroups = MemoryCgroups(clock)
        self._clock = clock
        self._limits = TargetLimits(per_user, clock)
        self._lock = threading.RLock()
        self._incidents_lock = threading.Lock()
        self._living: dict[int, Target] = {}
        self._ended: list[Target] = []
        self._reserved: dict[int, labels.Claim] = {}
        self._reserved_until = 0.0
        self._seen: set[tuple[int, int]] = set()
        self._failing: weakref.WeakSet[Target] = weakref.WeakSet()
        self._is_closed = False

    def targets(self) -> list[Target]:
        """Return all targets that are served, living and lingering ones, by pid."""
        with self._lock:
            return sorted([*self._living.values(), *self._ended], key=lambda target: target.pid)

    def incidents(self, **filters: Unpack[Query]) -> list[IncidentRow]:
        """Return incidents from the store, see `incidents.query`.

        A daemon for certain pids returns only those of its targets.
        """
        with self._lock:
            processes = None if self._only is None else frozenset(self._seen)
        return self.store.query(processes, **filters)

    def forget(self, age_s: float) -> None:
        """Forget incidents of this age.

        The age is relative to the newest incident, so that a clock that is set ahead does not empty the store.
        """
        newest = self.store.query(limit=1)
        if newest:
            self.store.prune(min(time.time(), newest[0]["last"]) - age_s)

    def get(self, pid: int) -> Target:
        """Return the target of a pid, a living one before one that lingers.

        Raises:
            NoSuchTarget: the daemon knows of no agent in this process.
        """
        for target in sorted(self.targets(), key=lambda target: target.ended is not None):
            if target.pid == pid:
                return target
        raise NoSuchTarget(
            f"process {pid} is not a target of this daemon",
            reason="not-attached",
            hint=f"Run `hookd attach {pid}`.",
        )

    def scan(self) -> tuple[list[Target], list[Candidate]]:
        """Look for pages in all processes that this daemon may see.

        Only one thread may call this at a time.

        Returns:
            The new targets, and the Python processes that are new or have changed.
        """
        with self._lock:
            served = Counter(target.identity.uid for target in self._living.values())
        for pid in self._limits.reopened(served):
            self._census.recheck(pid)
        candidates = self._census.scan()
        with self._lock:
            living = list(self._living.values())
        # Of the known targets only those without their page can be new: the agent has left, or another program runs.
        pids = self._without_page(living)
        pids += [
            candidate.pid for candidate in candidates if candidate.state == "attached" and candidate.pid not in pids
        ]
        return self._adopt_in_turn(pids), candidates

    def _without_page(self, living: list[Target]) -> list[int]:
        """Return the pids of targets that have closed their page.

        This takes at most POLL_LIMIT_S per user, in another order each time.
        """
        of_user: defaultdict[int, list[Target]] = defaultdict(list)
        random.shuffle(living)
        for target in living:
            of_user[target.identity.uid].append(target)
        pids = []
        for user, targets in of_user.items():
            until = self._clock() + POLL_LIMIT_S
            with contextlib.suppress(AttachError):  # the state of this user's targets is unknown now
                for target in without_page(user, targets):
                    pids.append(target.pid)
                    if self._clock() > until:
                        break
        return sorted(pids)

    def _adopt_in_turn(self, pids: Sequence[int]) -> list[Target]:
        """Make targets of processes that have pages. This takes at most POLL_LIMIT_S per user; the rest waits for the next scan."""
        limit, new = TimeLimit(POLL_LIMIT_S, self._clock), []
        for pid in pids:
            user = account_of(pid)
            if limit.is_over(user):
                self._census.recheck(pid)
                continue
            with limit.of(user), WAITERS.within(INSPECTION_S):
                if (target := self.adopt(pid)) is not None:
                    new.append(target)
        return new

    def adopt(self, pid: int) -> Target | None:
        """Make a target of a process that has a page.

        Returns:
            None if the process has no page, is a target already, or may not be seen.
        """
        try:
            ticks = proc.start_ticks(pid)  # before the page is opened; compared after everything has been read
            fd = find_page(pid)
        except (HookdError, OSError) as exc:
            self._try_again(pid, exc)
            return None
        try:
            corrupted = self._corrupted(pid, fd)
        except AttachError as exc:  # unknown whether the process still has its page open
            self._try_again(pid, exc)
            if fd is not None:
                os.close(fd)
            return None
        with self._lock:
            known = self._living.get(pid)
            if fd is None:
                self._limits.forget(pid)
                if known is None:  # the scan has seen a page there, so it may only be unreadable at this moment
                    self._census.recheck(pid)
                if known is not None and known.ended is None:
                    self._end_without_page(known, is_corrupt=known is corrupted)
                return None
            if self._is_closed or (known is not None and known.page == page_id(fd)):
                os.close(fd)
                return None
            if known is not None:
                self._end_without_page(known, is_corrupt=known is corrupted)
        if not self._has_room(pid, fd):
            os.close(fd)
            return None
        return self._take(pid, fd, ticks)

    def _corrupted(self, pid: int, fd: int | None) -> Target | None:
        """Return the target of a process that has damaged its page.

        The process still has the page open, but `fd` is another page, or None. This may take a second: do not
        call it under the lock.
        """
        with self._lock:
            known = self._living.get(pid)
        if known is None or known.ended is not None or (fd is not None and known.page == page_id(fd)):
            return None
        return known if known.has_page_open() and proc.has_memory(pid) else None

    def _has_room(self, pid: int, fd: int) -> bool:
        uid = account_of(pid)
        if self._count(uid) >= self._limits.per_user:
            self._limits.refuse_user(pid, uid)
            return False
        if not self._limits.has(fd):
            self._limits.refuse(pid)
            return False
        return True

    def _count(self, uid: int) -> int:
        with self._lock:
            return sum(1 for target in self._living.values() if target.identity.uid == uid)

    def require_room(self, pid: int) -> None:
        """Refuse one more process of a user who has the maximum number of targets.

        Raises:
            HookdError: reason "no-room".
        """
        uid = account_of(pid)
        with self._lock:
            is_served = pid in self._living
        if not is_served and self._count(uid) >= self._limits.per_user:
            raise HookdError(
                f"process {pid} cannot be served: user {user_name(uid)} has {self._limits.per_user} targets already",
                reason="no-room", hint="Raise targets_per_user under [serve] in the configuration of the daemon.",
            )  # fmt: skip

    def _read(self, pid: int, fd: int, ticks: int) -> Target | None:
        try:
            target = Target(pid, fd, self._clock)
        except (HookdError, OSError) as exc:  # it ended meanwhile
            _log.info("process %d: %s", pid, exc)
            self._try_again(pid, exc)
            with contextlib.suppress(OSError):
                os.close(fd)
            return None
        is_same = target.start_ticks == ticks and proc.is_same(target.pid, ticks)
        snapshot = target.last()
        if is_same and target.identity.method == "test" and not self._serves_tests:
            target.close()
            return None
        if is_same and (snapshot is None or snapshot.state not in {"starting", "detached"}):
            return target
        # Either the pid belongs to another process by now, and the page must not count as that process's or its user's. Or the
        # agent is about to release its page: its target has just ended for that reason, and must not be served as attached. Or
        # it has just begun, and leaves again if a plugin fails: that is an attach that failed, not a target that was detached.
        target.close()
        self._census.recheck(pid)
        return None

    def _try_again(self, pid: int, exc: Exception) -> None:
        """Schedule another inspection of a process whose page had a temporary error."""
        if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
            self._limits.refuse(pid)
        elif isinstance(exc, HookdError) and exc.reason == "unreadable":
            self._census.recheck(pid)

    def _take(self, pid: int, fd: int, ticks: int) -> Target | None:
        target = self._read(pid, fd, ticks)  # takes seconds for a large page: not under the lock
        return None if target is None else self._add(target)

    def _add(self, target: Target) -> Target | None:
        pid = target.pid
        with self._lock:
            known = self._living.get(pid)
            if self._is_closed or (known is not None and known.page == target.page):  # another thread was quicker
                target.close()
                return None
            self._name(target)
            self._living[pid] = target
            self._limits.forget(pid)
            self._reserved.pop(pid, None)
            if self._only is not None:
                self._seen.add((pid, target.start_ticks))
        target.evidence.memory = self._memory_cgroups.of(pid)
        self.catch_up(target)
        target.incidents_stored = self.store.seen(self._key(target))
        self._keep_incidents(target)
        _log.info("found an agent %s", who(target))
        return target

    def claim(self, identity: Identity, pid: int) -> labels.Claim:
        """Determine the run and rank of a target, or of a process that is to become one.

        A run belongs to one user: the first one with a name keeps it until the last target of that name is no longer served. A
        process that an earlier daemon has served keeps its name.
        """
        uid, job = identity.uid, identity.job.launcher
        others = self._claims_beside(pid, uid)
        if (before := self._reserved.get(pid)) is not None and _is_kept(before, identity, others):
            return before
        return labels.claim(pid, job, identity.rank, identity.run, chosen=identity.is_shared, others=others, uid=uid)

    def _claims_beside(self, pid: int, uid: int) -> list[labels.Claim]:
        """Return the claims that one more target of a user has to respect."""
        with self._lock:
            living = [other for other in self._living.values() if other.pid != pid]
            # A target whose page is corrupt is served, too.
            others = [
                target
                for target in living
                if target.ended is None or target.state == "corrupt" or target.identity.uid != uid
            ]
            # A user's new job replaces that user's last one, which lingers; it must not replace another user's.
            lingering = [target.claim for target in self._ended if target.identity.uid != uid]
            if self._clock() >= self._reserved_until:
                self._reserved.clear()
            reserved = [
                claim
                for claim in self._reserved.values()
                if claim.pid != pid and (claim.uid != uid or proc.size(claim.pid))
            ]
        return [*(target.claim for target in others), *lingering, *reserved]

    def reserve(self, claims: Iterable[labels.Claim]) -> None:
        """Reserve names that an earlier daemon has served, for the linger time.

        Other processes may be found first; and the name of a process that has ended meanwhile must not go to another user at
        once.
        """
        with self._lock:
            self._reserved = {claim.pid: claim for claim in claims if claim.uid >= 0}
            self._reserved_until = self._clock() + self._linger_s

    def _name(self, target: Target) -> None:
        """Label a target, and its parent as launcher.

        Under `hookd run` the parent of a rank may have an agent too, but it is not rank 0.
        """
        identity = target.identity
        with self._lock:
            parent = self._living.get(identity.ppid)
            is_launcher = parent is not None and parent.identity.uid == identity.uid and parent.identity.world_size == 1
            if parent is not None and is_launcher and identity.world_size > 1:
                old = parent.claim
                parent.claim = labels.Claim(parent.pid, parent.pid, _LAUNCHER, old.wanted, old.run, uid=old.uid)
                target.claim = self.claim(identity, target.pid)
                parent.claim.run = target.claim.run
                self._take_over(parent.claim)
            else:
                target.claim = self.claim(identity, target.pid)
            self._take_over(target.claim)

    def _take_over(self, claim: labels.Claim) -> None:
        """Stop serving lingering targets of this name: each series must be unique."""
        with self._lock:
            self._ended = [old for old in self._ended if not _is_same(old.claim, claim)]

    def _end_without_page(self, target: Target, *, is_corrupt: bool) -> None:
        """End a target whose process has no good page any more.

        Its agent was detached, the process runs another program, or it has damaged its page.
        """
        snapshot = target.read()
        if target.ended is None and is_corrupt:
            target.mark_corrupt()
        if target.state == "corrupt":
            return
        if snapshot is not None and snapshot.state in ("detaching", "detached"):
            target.detach()
        else:
            target.lose()
        self._retire(target)

    def poll(self) -> None:
        """Look at every page and process, and drop targets whose linger time is over.

        This takes at most POLL_LIMIT_S per user; the user's other targets wait for the next poll, so that other users' need not.
        """
        self._memory_cgroups.poll()
        limit = TimeLimit(POLL_LIMIT_S, self._clock)
        for target in sorted(self.targets(), key=lambda target: target.polled_at):
            owner = target.identity.uid
            if limit.is_over(owner):
                continue  # these are the first at the next poll
            target.polled_at = self._clock()
            try:
                with limit.of(owner):
                    self._see(target)
            except Exception:  # noqa: BLE001  whatever it is, the others are polled
                if target not in self._failing:
                    self._failing.add(target)
                    _log.exception("target %d cannot be looked at", target.pid)
        with self._lock:
            now = self._clock()
            self._ended = [
                target for target in self._ended if target.ended is None or now - target.ended.at < self._linger_s
            ]
            ended = list(self._ended)
        for target in ended:
            if not limit.is_over(owner := target.identity.uid):
                with limit.of(owner):
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
            self._report_corrupt(target)
        elif target.ended is not None:
            self._retire(target)

    def _rename(self, target: Target) -> None:
        """Update the labels of a target from its page. Its rank is known once torch.distributed is initialized."""
        before = target.identity
        after = target.reidentify()
        if (before.run, before.rank, before.world_size) != (after.run, after.rank, after.world_size):
            self._name(target)
            _log.info("target %d is now run %s, rank %s", target.pid, target.claim.run, target.claim.rank)

    def lose(self, target: Target) -> None:
        """Take the last copy of a page whose process is gone."""
        target.lose()
        self._retire(target)

    def leave(self, target: Target) -> None:
        """Take the last copy of a page whose agent was asked to leave."""
        target.detach()
        self._retire(target)

    def _retire(self, target: Target) -> None:
        with self._lock:
            if self._living.get(target.pid) is not target:
                return
            del self._living[target.pid]
            if not any(_is_same(other.claim, target.claim) for other in self._living.values()):
                self._ended.append(target)
                beside = [other for other in self._ended if other.identity.uid == target.identity.uid]
                if len(beside) > self._limits.per_user:
                    self._ended.remove(beside[0])
        target.release()
        self._census.recheck(target.pid)
        self._keep_incidents(target)
        self._report_end(target)
        if target.was_sent_away:
            self.store.dismiss(target.pid, target.start_ticks)

    def _report_end(self, target: Target) -> None:
        assert target.ended is not None
        why = "" if target.ended.reason == target.state else f" ({target.ended.reason})"
        _log.info("target %s: %s%s", who(target), target.state, why)
        death = target.ended.death
        if death is not None and death.is_incident:
            message = f"process {target.pid} {death.message}"
            self.report(target, target.state, message, **death.fields, seq=END, time=target.ended.time)

    def _report_corrupt(self, target: Target) -> None:
        """Report once, across daemons, that a page is no longer read. The process continues."""
        if target.ended is not None and not target.reported.get("corrupt"):
            message = f"the page of process {target.pid} {_UNREAD.get(target.ended.reason, _UNREAD['corrupt'])}"
            self.report(target, "corrupt", message, reason=target.ended.reason)

    def catch_up(self, target: Target) -> None:
        """Read from the store the incidents that daemons have reported about a target.

        These are earlier daemons, and others that run now.
        """
        counts, target.ongoing = self.store.own(self._key(target))
        target.reported |= {kind: max(count, target.reported.get(kind, 0)) for kind, count in counts.items()}

    def report(self, target: Target | FormerTarget, kind: str, message: str, **fields: Any) -> None:
        """Log an incident that the daemon itself has seen.

        It is stored and counted, unless another daemon was faster. An incident beyond the limits of its
        run or user is dropped, see `admission.LIMITS`.

        Args:
            target: the target, or an earlier daemon's note of one.
            kind: one word of a small set: it is a label. A condition that lasts begins with `KIND` and ends with `KIND_over`.
            message: for a person.
            fields: further facts, as JSON. `step` and `module` have their own columns; all fields are stored. `time` is
                needed if it is not now.
        """
        incident = {"time": time.time(), "kind": kind, "message": message, **fields}
        is_new = self.admission.add_own(self._source(target), incident)
        if is_new is None:
            return
        if is_new:
            target.reported[kind] = target.reported.get(kind, 0) + 1
        elif "seq" in fields:
            return  # the end: already known
        if isinstance(target, Target):
            self.catch_up(target)
        with self._incidents_lock:
            target.incident_log.add(target, [incident])

    def _keep_incidents(self, target: Target) -> None:
        snapshot = target.last()
        if snapshot is None:
            return
        with self._incidents_lock:  # the end of a target and a poll may coincide
            if target.repairs != self.store.repairs:
                target.repairs, target.incidents_stored = self.store.repairs, 0
            fresh = [incident for incident in snapshot.incidents if _seq(incident) > target.incidents_stored]
            new: Sequence[Incident] = ()
            if fresh:
                new, dropped = self.admission.add(self._source(target), fresh)
                target.incidents_dropped += dropped + self._missed(target, fresh)
                target.incidents_stored = max(map(_seq, fresh))
            target.incident_log.add(target, new)
            if target.ended is not None:
                target.incident_log.end(target)

    def _missed(self, target: Target, fresh: Sequence[Incident]) -> int:
        """Count the incidents that were overwritten on the page since it was last read."""
        gone = min(max(0, _seq(fresh[0]) - target.incidents_stored - 1), MOST_COUNTED) if target.incidents_stored else 0
        if gone:
            self.admission.missed(self._source(target), gone)
        return gone

    def _source(self, target: Target | FormerTarget) -> Source:
        return Source(self._key(target), target.claim, target.claim.uid)

    @staticmethod
    def _key(target: Target | FormerTarget) -> tuple[int, int, int]:
        return (target.pid, target.start_ticks, target.page[1])

    def close(self) -> None:
        """Release every target; the agents stay as they are."""
        for target in self.targets():
            self._keep_incidents(target)  # the store may just have been repaired, without all incidents of the pages
        self.admission.sum_up(is_last=True)
        with self._lock:
            self._is_closed = True
            for target in self.targets():
                target.close()
            self._living.clear()
            self._ended.clear()


_UNREAD = {
    "corrupt": "cannot be trusted, and is no longer read",
    "protocol": "is of another version of hookd, and this one cannot read it",
}


def _is_kept(before: labels.Claim, identity: Identity, others: Iterable[labels.Claim]) -> bool:
    """Whether a process can keep the name that an earlier daemon gave it.

    It still has the same user, run and rank (or was served as a launcher), and nobody else has the name.
    """
    # The tag may be another one now, after its launcher has gone.
    if before.uid != identity.uid or not labels.is_called(before.wanted, identity.name):
        return False
    if before.rank not in (identity.rank, _LAUNCHER):
        return False
    return all(other.run != before.run or (other.uid == before.uid and other.rank != before.rank) for other in others)


def _is_same(one: labels.Claim, other: labels.Claim) -> bool:
    return (one.run, one.rank) == (other.run, other.rank)


def _seq(incident: Incident) -> int:
    return incident["seq"]
