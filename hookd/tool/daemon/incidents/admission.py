"""Admit incidents to the store: limit their kinds and their rate, and report how many were dropped."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.tool.daemon.incidents.kinds import Kinds
from hookd.tool.daemon.incidents.store import DROPPED
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.collapse import same
from hookd.tool.reports.wording import process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from hookd.tool.daemon.incidents.store import IncidentStore
    from hookd.wire.incident import Incident
    from hookd.wire.labels import Claim

SUM_UP_S = 5.0
"""Interval at which the incident `dropped` is updated while more are dropped, in seconds."""
LOG_S, LINES = 60.0, 5
"""Interval at which dropped incidents are logged, in seconds, and the maximum number of lines each time."""
MOST_COUNTED = 10**12
"""Maximum count of dropped incidents of one scope."""
MAX_KNOWN = 20_000
"""Maximum number of incidents, of all targets, that are remembered to recognize repeated ones; the store knows the others."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limit:
    """A limit on new rows: `burst` at once, after that `per_s` per second."""

    burst: int
    per_s: float


LIMITS = {"target": Limit(100, 1.0), "run": Limit(400, 4.0), "user": Limit(1000, 10.0)}
"""By scope; a row needs room in all three. Equal incidents are one row, see `hookd.tool.reports.collapse`."""


@dataclass(frozen=True)
class Source:
    """The process that incidents come from.

    Attributes:
        process: pid, start ticks, inode of the page.
        claim: the run and rank under which it is served.
        owner: the uid of the process, from the kernel; -1: unknown.
    """

    process: tuple[int, int, int]
    claim: Claim
    owner: int


class Scope(NamedTuple):
    """The scope of a limit: a target, a run of a user, or a user; the daemon's own incidents are counted separately."""

    level: str
    name: tuple[object, ...]
    is_own: bool

    def words(self, source: Source) -> str:
        """Return the scope in words, given one of its sources."""
        claim, user = source.claim, user_name(source.owner)
        process = process_of(source.process[0], user)
        return {
            "target": f"run {claim.run}, rank {claim.rank} ({process})",
            "run": f"run {claim.run}{f' of user {user}' if user else ''}",
            "user": f"user {user or 'unknown'}",
        }[self.level]


class _Bucket:
    """A token bucket, full at first."""

    def __init__(self, limit: Limit, now: float) -> None:
        self._limit = limit
        self._left = float(limit.burst)
        self._seen = now

    def left(self, now: float) -> float:
        """Return the number of rows that are allowed now."""
        self._left = min(float(self._limit.burst), self._left + (now - self._seen) * self._limit.per_s)
        self._seen = now
        return self._left

    def take(self) -> None:
        """Take one token."""
        self._left -= 1


@dataclass
class _Loss:
    """Incidents of a scope that were dropped.

    Attributes:
        source: of the first of them.
        first, last: unix seconds.
        number: under which the store has the incident that says so; 0: it does not yet.
        changed: monotonic seconds of the last one.
        stored, logged: how many the store and the log have been given.
        written: monotonic seconds of when the store was.
    """

    source: Source
    first: float
    last: float
    count: int = 0
    number: int = 0
    changed: float = 0.0
    stored: int = 0
    written: float = float("-inf")
    logged: int = 0


class Admission:
    """Admits incidents to the store; thread-safe."""

    def __init__(self, store: IncidentStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[Scope, _Bucket] = {}
        self._known: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._losses: dict[Scope, _Loss] = {}
        self._logged_at = float("-inf")
        self.kinds = Kinds()

    def add(self, source: Source, incidents: Iterable[Incident]) -> tuple[list[Incident], int]:
        """Store incidents of a page.

        Returns:
            The incidents that are neither repeated nor dropped, and the number of dropped ones.
        """
        new: list[Incident] = []
        admitted: list[Incident] = []
        dropped = 0
        with self._lock:
            for reported in incidents:
                incident = self._bounded(source, reported)
                name = (*source.process, same(incident))
                if name not in self._known:
                    if not self._admit(source, is_own=False):
                        dropped += 1
                        continue
                    new.append(incident)
                self._remember(name)
                admitted.append(incident)
            claim = source.claim
            self._store.add(source.process, claim.run, claim.rank, admitted, owner=source.owner)
        return new, dropped

    def add_own(self, source: Source, incident: Mapping[str, Any]) -> bool | None:
        """Store an incident of the daemon itself, see `IncidentStore.add_own`; return None if it is dropped."""
        with self._lock:
            if not self._admit(source, is_own=True):
                return None
            claim = source.claim
            return self._store.add_own(source.process, claim.run, claim.rank, incident, owner=source.owner)

    def missed(self, source: Source, count: int) -> None:
        """Count incidents that were overwritten on a page before they were read."""
        with self._lock:
            narrowest = next(_scopes(source, is_own=False))
            # Reporting them takes a row, which needs room; without room, `_admit` counts the loss itself.
            if narrowest in self._losses or self._admit(source, is_own=False):
                self._lose(narrowest, source, count)

    def keep(self, processes: Collection[tuple[int, int, int]]) -> None:
        """Forget the kinds of all targets except these."""
        self.kinds.keep(processes)

    def sum_up(self, *, is_last: bool = False) -> None:
        """Store and log the numbers of dropped incidents, and forget old ones; called about once a second and at the end."""
        now = self._clock()
        with self._lock:
            self._log(now)
            for scope, loss in list(self._losses.items()):
                if loss.count > loss.stored and (is_last or now - loss.written >= SUM_UP_S):
                    self._write(scope, loss, now)
                if loss.count == loss.logged == loss.stored and now - loss.changed >= LOG_S:
                    del self._losses[scope]
            for scope in [
                scope for scope, bucket in self._buckets.items() if bucket.left(now) >= LIMITS[scope.level].burst
            ]:
                del self._buckets[scope]

    # ---- one incident. Locked.

    def _bounded(self, source: Source, incident: Incident) -> Incident:
        """Return the incident, with the kind OTHER if there are too many kinds."""
        own = str(incident.get("kind", ""))
        kind = self.kinds.bounded(source.owner, source.process, own)
        if kind == own:
            return incident
        return {**incident, "kind": kind, "message": f"{own}: {incident.get('message', '')}"}

    def _remember(self, name: tuple[object, ...]) -> None:
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _admit(self, source: Source, *, is_own: bool) -> bool:
        now = self._clock()
        scopes = list(_scopes(source, is_own=is_own))
        buckets = [self._buckets.get(scope) or _Bucket(LIMITS[scope.level], now) for scope in scopes]
        full = next((scope for scope, bucket in zip(scopes, buckets, strict=True) if bucket.left(now) < 1), None)
        if full is not None:
            self._lose(full, source, 1)
            return False
        for scope, bucket in zip(scopes, buckets, strict=True):
            bucket.take()
            self._buckets[scope] = bucket
        return True

    # ---- what was dropped. Locked.

    def _log(self, now: float) -> None:
        new = [(scope, loss) for scope, loss in self._losses.items() if loss.count > loss.logged]
        if not new or now - self._logged_at < LOG_S:
            return
        self._logged_at = now
        for scope, loss in sorted(new, key=lambda pair: pair[1].count, reverse=True)[:LINES]:
            _log.warning("%s", _sentence(scope, loss))
        if len(new) > LINES:
            _log.warning("incidents of %d more targets, runs or users were dropped", len(new) - LINES)
        for _, loss in new:
            loss.logged = loss.count

    def _lose(self, scope: Scope, source: Source, count: int) -> None:
        now = time.time()
        loss = self._losses.setdefault(scope, _Loss(source, now, now))
        loss.count = min(loss.count + count, MOST_COUNTED)  # a page may claim any number
        loss.last, loss.changed = now, self._clock()

    def _write(self, scope: Scope, loss: _Loss, now: float) -> None:
        process, claim = loss.source.process, loss.source.claim
        loss.number = loss.number or self._store.free_number(process)
        incident = {
            "kind": DROPPED, "message": _sentence(scope, loss), "time": loss.first, "seq": loss.number, "last": loss.last,
            "dropped": loss.count,
        }  # fmt: skip
        self._store.replace(process, claim.run, claim.rank, incident, owner=loss.source.owner)
        loss.stored, loss.written = loss.count, now


def _scopes(source: Source, *, is_own: bool) -> Iterator[Scope]:
    yield Scope("target", source.process, is_own)
    yield Scope("run", (source.owner, source.claim.run), is_own)
    yield Scope("user", (source.owner,), is_own)


def _sentence(scope: Scope, loss: _Loss) -> str:
    spent = max(1.0, loss.last - loss.first)
    return f"{loss.count:,} more incidents of {scope.words(loss.source)} were dropped in {spent:,.0f} s"
