"""Detect replicas that have diverged: compare the checksums of the plugin `drift` between the ranks of a run.

A checksum belongs to a boundary between steps, which has the same number on all ranks: its mark. A poll may find the ranks
at different boundaries, so the last checksums of each rank are kept, and compared at the newest mark that all ranks have.
Only ranks with the same layout are compared: those that check the same parameters within the same process group.

A poll may read a torn checksum, if the page was copied while the plugin wrote it. A difference therefore counts only after
two polls, the second of which has read the checksum again. Diverged replicas do not become equal again by themselves.
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
"""Number of checksums that are kept for each rank."""
SURE = 2
"""Number of polls in a row that must see a difference."""
MOST_NAMED = 8
"""Maximum number of modules that an incident names."""

DIVERGED = Declared(
    "hookd_drift_diverged",
    "gauge",
    "1 for a rank whose replica differs from that of most others on this node; of equally many, for all of them.",
)
DRIFT, OVER = "drift", "drift_over"
"""The kinds of its incidents."""


class Checksums(NamedTuple):
    """The checksums that a rank has published at one boundary."""

    mark: float
    layout: float
    step: int
    modules: Mapping[str, float]


class Difference(NamedTuple):
    """The difference between the ranks at one boundary.

    Attributes:
        odd: the ranks that are not in the largest group of equal ranks.
        others: the ranks of that group.
        modules: the modules that differ.
        is_even: whether a second group is as large, so that the correct one is unknown.
    """

    odd: tuple[Target, ...]
    others: tuple[Target, ...]
    modules: tuple[str, ...]
    is_even: bool


class _Group:
    """The ranks of a run with one layout, and the state of their comparison."""

    def __init__(self, members: Sequence[Target]) -> None:
        self.members = tuple(members)
        self.agreed: dict[Target, int] = {}  # by rank, the step of the last checksum at which all ranks were equal
        self.seen = 0  # polls in a row with the same odd ranks
        self.odd: frozenset[Target] = frozenset()
        self.first: dict[Target, int] = {}  # by odd rank, the step of the first checksum that differed
        self.compared = -1.0  # the mark that was compared last


class Drift:
    """Watches the replicas of every run; reports ranks that diverge, and when they are equal again."""

    families: Sequence[Declared] = (DIVERGED,)

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[Target, dict[float, Checksums]] = {}
        self._groups: dict[tuple[str, float], _Group] = {}
        self._is_odd: dict[Target, bool] = {}

    def poll(self, targets: Sequence[Target]) -> None:
        """Read the newest checksums and compare them; see `watch.Watcher`."""
        groups: dict[tuple[str, float], list[Target]] = {}
        last: dict[Target, dict[float, Checksums]] = {}
        for run, members in ranks.by_run(targets).items():
            for target in members:
                if own := self._keep(target):
                    last[target] = own
                    groups.setdefault((run, next(reversed(own.values())).layout), []).append(target)
        self._last = last
        self._is_odd = {target: is_odd for target, is_odd in self._is_odd.items() if target in last}
        self._groups = {key: self._group(key, members) for key, members in groups.items() if len(members) > 1}
        for group in self._groups.values():
            self._compare(group)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Return whether a rank has diverged, once it was compared; see `watch.Watcher`."""
        known = self._is_odd.get(target)
        return () if known is None else (Sample(DIVERGED, {}, float(known)),)

    def _keep(self, target: Target) -> dict[float, Checksums]:
        """Return the last checksums of a rank with its current layout, by mark, the newest last."""
        newest, before = checksums_of(target), self._last.get(target, {})
        if newest is None:  # the plugin is just writing it
            return before
        kept = {mark: old for mark, old in before.items() if old.layout == newest.layout}
        kept.pop(newest.mark, None)  # move it to the end; a torn checksum is replaced by the complete one
        kept[newest.mark] = newest
        for mark in list(kept)[:-KEPT]:
            del kept[mark]
        return kept

    def _group(self, key: tuple[str, float], members: Sequence[Target]) -> _Group:
        known = self._groups.get(key)
        return known if known is not None and known.members == tuple(members) else _Group(members)

    def _compare(self, group: _Group) -> None:
        common = set.intersection(*(set(self._last[target]) for target in group.members))
        if not common or (max(common) == group.compared and not (0 < group.seen < SURE)):
            return
        group.compared = max(common)
        at = {target: self._last[target][group.compared] for target in group.members}
        diff = difference(at)
        odd = frozenset() if diff is None else frozenset(diff.odd)
        group.seen = group.seen + 1 if odd == group.odd else 1
        group.first = {target: group.first.get(target, at[target].step) for target in odd}
        group.odd = odd
        if diff is None:
            self._settle_alike(group, at)
        elif group.seen >= SURE:
            self._settle_odd(group, diff)

    def _settle_alike(self, group: _Group, at: Mapping[Target, Checksums]) -> None:
        for target, checksums in at.items():
            group.agreed[target] = checksums.step
            if self._is_reported(target):
                message = f"rank {target.claim.rank} is equal to the others again"
                self._fleet.report(target, OVER, message, step=checksums.step)
            self._is_odd[target] = False

    def _settle_odd(self, group: _Group, diff: Difference) -> None:
        for target in group.members:
            self._is_odd[target] = target in diff.odd or diff.is_even
        for target in diff.odd:
            if not self._is_reported(target):
                self._report(group, target, diff)

    @staticmethod
    def _is_reported(target: Target) -> bool:
        """Whether this daemon, or an earlier one, has reported the divergence, and not yet its end."""
        return DRIFT in target.ongoing

    def _report(self, group: _Group, target: Target, diff: Difference) -> None:
        since, first = group.agreed.get(target), group.first[target]
        when = f"first seen at step {first}" + (f", not yet at step {since}" if since is not None else "")
        snapshot = target.last()
        described = snapshot.described if snapshot is not None else str
        shown = [*map(described, diff.modules[:MOST_NAMED]), *(["..."] if len(diff.modules) > MOST_NAMED else [])]
        whom = f"from {ranks.named(diff.others)}"
        even = ": half of them differ, so it is unknown which are right" if diff.is_even else ""
        verb = "differs" if len(diff.odd) == 1 else "differ"
        message = f"the replica of {ranks.named(diff.odd)} {verb} {whom} in {', '.join(shown)}; {when}{even}"
        fields: dict[str, object] = {
            "module": diff.modules[0],
            "modules": list(diff.modules),
            "ranks": [odd.claim.rank for odd in diff.odd],
            "agreed_at_step": since,
        }
        self._fleet.report(target, DRIFT, message, step=first, **fields)


def checksums_of(target: Target) -> Checksums | None:
    """Return the last checksums that a rank has published; None if there are none, or they are invalid."""
    snapshot = target.last()
    if snapshot is None:
        return None
    scalars = {
        name: ranks.counts(ranks.family(snapshot, f"hookd_drift_{name}", ())).get("")
        for name in ("mark", "layout", "step")
    }
    modules = ranks.counts(ranks.family(snapshot, "hookd_drift_checksum", ("module",)))
    mark, layout, step = scalars["mark"], scalars["layout"], scalars["step"]
    if mark is None or layout is None or step is None or mark <= 0 or not modules:
        return None
    return Checksums(mark, layout, int(step), modules)


def difference(at: Mapping[Target, Checksums]) -> Difference | None:
    """Compare the ranks at one boundary; return None if all are equal, or cannot be compared."""
    names = {frozenset(target.modules) for target in at.values()}
    if len(names) != 1:  # a rank was just writing its checksums
        return None
    modules = sorted(next(iter(names)))
    replicas: dict[tuple[float, ...], list[Target]] = {}
    for target, checksums in at.items():
        replicas.setdefault(tuple(checksums.modules[name] for name in modules), []).append(target)
    if len(replicas) < 2:
        return None
    # The sort is stable: of groups of equal size, the one with the lowest rank comes first.
    groups = sorted(replicas.values(), key=len, reverse=True)
    odd = tuple(target for group in groups[1:] for target in group)
    differing = tuple(
        name for name in modules if len(Counter(checksums.modules[name] for checksums in at.values())) > 1
    )
    return Difference(odd, tuple(groups[0]), differing, len(groups[1]) == len(groups[0]))
