"""Replicas that are no longer alike: the checksums of the plugin `drift`, compared between the ranks of a run.

A checksum is of a boundary that has the same number, its mark, on all ranks. Each poll may find the ranks at different
ones, so the last of each are kept, and compared where several ranks have the same. Only ranks that compare the same
parameters within the same process group (their layout) are compared at all.

What a poll finds may be torn: the page was copied while the plugin wrote. So a difference counts once it was seen in two
polls, the second of which has read again what was torn; replicas that have parted do not find together by themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.fleet import ranks
from hookd.tool.daemon.watch.watcher import Declared, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target

KEPT = 16
"""Checksums of each rank that wait for the others'."""
SURE = 2
"""Polls that must see a difference."""
MOST_NAMED = 8
"""Modules that an incident names."""

DIVERGED = Declared(
    "hookd_drift_diverged",
    "gauge",
    "1 for a rank whose replica differs from that of most others on this node; of equally many, for all of them.",
)
TOLD, OVER = "drift", "drift_over"
"""Kinds of incidents."""


class Checksums(NamedTuple):
    """What a rank has published of one boundary."""

    mark: float
    layout: float
    step: int
    modules: Mapping[str, float]


class Difference(NamedTuple):
    """What differs at one boundary.

    Attributes:
        odd: the ranks that are not like most.
        others: those that are.
        modules: in which they differ.
        is_even: as many are odd as are not: nobody can tell which are right.
    """

    odd: tuple[Target, ...]
    others: tuple[Target, ...]
    modules: tuple[str, ...]
    is_even: bool


class _Kept:
    """What is known of one group of ranks that hold the same."""

    def __init__(self, members: Sequence[Target]) -> None:
        self.members = tuple(members)
        self.agreed: dict[Target, int] = {}  # the step of the last checksum in which it was like most
        self.seen = 0  # polls in a row with the same odd ranks
        self.odd: frozenset[Target] = frozenset()
        self.first: dict[Target, int] = {}  # the step of the checksum that has begun them
        self.compared = -1.0  # the last mark


class Drift:
    """Watches the replicas of every run.

    Args:
        fleet: is told of ranks that have diverged, and when they are alike again.
    """

    families: Sequence[Declared] = (DIVERGED,)

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[Target, dict[float, Checksums]] = {}
        self._groups: dict[tuple[str, float], _Kept] = {}
        self._is_odd: dict[Target, bool] = {}

    def look(self, targets: Sequence[Target]) -> None:
        """Take the newest checksums, and compare; see `watch.Watcher`."""
        groups: dict[tuple[str, float], list[Target]] = {}
        last: dict[Target, dict[float, Checksums]] = {}
        for run, members in ranks.by_run(targets).items():
            for one in members:
                if own := self._keep(one):
                    last[one] = own
                    groups.setdefault((run, next(reversed(own.values())).layout), []).append(one)
        self._last = last
        self._is_odd = {one: is_odd for one, is_odd in self._is_odd.items() if one in last}
        self._groups = {key: self._kept(key, members) for key, members in groups.items() if len(members) > 1}
        for kept in self._groups.values():
            self._compare(kept)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Say whether a rank has diverged, once it was compared; see `watch.Watcher`."""
        known = self._is_odd.get(target)
        return () if known is None else (Sample(DIVERGED, {}, float(known)),)

    def _keep(self, one: Target) -> dict[float, Checksums]:
        """Give the last checksums of a rank, the newest last; only those that are of its layout."""
        found, before = checksums_of(one), self._last.get(one, {})
        if found is None:  # it is just being written
            return before
        kept = {mark: old for mark, old in before.items() if old.layout == found.layout}
        kept.pop(found.mark, None)  # to the end: read again, it is whole now where it was torn
        kept[found.mark] = found
        for mark in list(kept)[:-KEPT]:
            del kept[mark]
        return kept

    def _kept(self, key: tuple[str, float], members: Sequence[Target]) -> _Kept:
        known = self._groups.get(key)
        return known if known is not None and known.members == tuple(members) else _Kept(members)

    def _compare(self, kept: _Kept) -> None:
        common = set.intersection(*(set(self._last[one]) for one in kept.members))
        if not common or (max(common) == kept.compared and not (0 < kept.seen < SURE)):
            return
        kept.compared = max(common)
        at = {one: self._last[one][kept.compared] for one in kept.members}
        found = difference(at)
        odd = frozenset() if found is None else frozenset(found.odd)
        kept.seen = kept.seen + 1 if odd == kept.odd else 1
        kept.first = {one: kept.first.get(one, at[one].step) for one in odd}
        kept.odd = odd
        if found is None:
            self._settle_alike(kept, at)
        elif kept.seen >= SURE:
            self._settle_odd(kept, found)

    def _settle_alike(self, kept: _Kept, at: Mapping[Target, Checksums]) -> None:
        for one, checksums in at.items():
            kept.agreed[one] = checksums.step
            if self._is_told(one):
                message = f"rank {one.claim.rank} holds the same as the others again"
                self._fleet.tell(one, OVER, message, step=checksums.step)
            self._is_odd[one] = False

    def _settle_odd(self, kept: _Kept, found: Difference) -> None:
        for one in kept.members:
            self._is_odd[one] = one in found.odd or found.is_even
        for one in found.odd:
            if not self._is_told(one):
                self._tell(kept, one, found)

    @staticmethod
    def _is_told(one: Target) -> bool:
        """Whether it was told of, and not yet that it is over: by this daemon or by one before it."""
        return TOLD in one.ongoing

    def _tell(self, kept: _Kept, one: Target, found: Difference) -> None:
        since, first = kept.agreed.get(one), kept.first[one]
        when = f"first seen at step {first}" + (f", not yet at step {since}" if since is not None else "")
        shown = [*found.modules[:MOST_NAMED], *(["..."] if len(found.modules) > MOST_NAMED else [])]
        whom = f"from {ranks.named(found.others)}"
        even = ": as many differ as do not, so nobody can tell which are right" if found.is_even else ""
        verb = "differs" if len(found.odd) == 1 else "differ"
        message = f"the replica of {ranks.named(found.odd)} {verb} {whom} in {', '.join(shown)}; {when}{even}"
        fields: dict[str, object] = {
            "module": found.modules[0],
            "modules": list(found.modules),
            "ranks": [odd.claim.rank for odd in found.odd],
            "agreed_at_step": since,
        }
        self._fleet.tell(one, TOLD, message, step=first, **fields)


def checksums_of(target: Target) -> Checksums | None:
    """Give what a rank has published last; None where it publishes nothing, or nonsense."""
    snapshot = target.last()
    if snapshot is None:
        return None
    found = {
        name: ranks.counts(ranks.family(snapshot, f"hookd_drift_{name}", ())).get("")
        for name in ("mark", "layout", "step")
    }
    modules = ranks.counts(ranks.family(snapshot, "hookd_drift_checksum", ("module",)))
    mark, layout, step = found["mark"], found["layout"], found["step"]
    if mark is None or layout is None or step is None or mark <= 0 or not modules:
        return None
    return Checksums(mark, layout, int(step), modules)


def difference(at: Mapping[Target, Checksums]) -> Difference | None:
    """Compare the ranks at one boundary; None if all are alike, or nothing can be compared."""
    names = {frozenset(one.modules) for one in at.values()}
    if len(names) != 1:  # one of them was just being written
        return None
    modules = sorted(next(iter(names)))
    replicas: dict[tuple[float, ...], list[Target]] = {}
    for one, checksums in at.items():
        replicas.setdefault(tuple(checksums.modules[name] for name in modules), []).append(one)
    if len(replicas) < 2:
        return None
    groups = sorted(replicas.values(), key=len, reverse=True)  # stable: of equal ones that with the lowest rank first
    odd = tuple(one for group in groups[1:] for one in group)
    differing = tuple(
        name for name in modules if len(Counter(checksums.modules[name] for checksums in at.values())) > 1
    )
    return Difference(odd, tuple(groups[0]), differing, len(groups[1]) == len(groups[0]))
