"""Find the ranks whose modules another rank of their run serves.

The ranks of a data-parallel job have the same modules and do the same work, so a thousand of them would serve the same series a
thousand times. Ranks that have other modules (the stages of a pipeline) serve theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet import ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Snapshot

PATIENCE = 3
"""Number of steps in which a rank of a job on several nodes is to issue its first collective."""


class Replicas:
    """The ranks that need not serve their modules; used by one thread at a time.

    Args:
        is_fleet: whether the daemons of other nodes serve their ranks, too. Then only rank 0 of a job on several nodes serves its
            modules; otherwise one rank on each node does.
    """

    def __init__(self, *, is_fleet: bool = False) -> None:
        self._is_fleet = is_fleet
        self._known: set[Target] = set()

    def among(self, targets: Sequence[Target]) -> set[Target]:
        """Return the replicas among all targets of this node.

        One that has ended remains what it was: its last counters would be new series.
        """
        runs: dict[str, list[Target]] = {}
        for target in targets:
            if target.ended is None and target.identity.world_size > 1:
                runs.setdefault(target.claim.run, []).append(target)
        living = {target for members in runs.values() for target in self._of_run(ranks.in_order(members))}
        self._known = living | {target for target in targets if target.ended is not None and target in self._known}
        return self._known

    def _of_run(self, members: Sequence[Target]) -> Iterable[Target]:
        served: list[_Shown] = []
        is_elsewhere = self._is_fleet and members[0].claim.rank not in ("0", str(members[0].identity.local_rank))
        for target in members:
            shown = _Shown.of(target.last())
            is_replica = not shown.modules or any(shown.is_replica_of(other) for other in served)
            if is_replica or (is_elsewhere and shown.is_like_rank_0(target.identity.world_size)):
                yield target
            else:
                served.append(shown)


@dataclass(frozen=True)
class _Shown:
    """The contents of a page by which replicas are recognized.

    Attributes:
        modules: names and types.
        plugins: names of the plugins.
        groups: in which the rank has issued collectives, by their ranks.
        is_new: whether it may not have issued any yet.
    """

    modules: frozenset[tuple[str, str]]
    plugins: frozenset[str]
    groups: frozenset[str]
    is_new: bool

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> _Shown:
        """Return what a page has."""
        if snapshot is None:
            return cls(frozenset(), frozenset(), frozenset(), is_new=True)
        plugins: object = snapshot.identity.get("plugins")
        issued = ranks.counts(ranks.family(snapshot, "hookd_collectives", ("group",)))
        return cls(
            frozenset((entry.name, entry.type) for entry in snapshot.modules.values()),
            frozenset(plugins) if isinstance(plugins, dict) else frozenset(),
            frozenset(group.partition("#")[0] for group, number in issued.items() if number),
            is_new=not ranks.scalar(snapshot, "hookd_steps") >= PATIENCE,  # NaN before the first step
        )

    def is_replica_of(self, other: _Shown) -> bool:
        """Whether the other rank serves all that this one would."""
        # A page lists modules as they are first called, so one of two replicas may lack some for a moment.
        has_same = self.modules <= other.modules or self.modules >= other.modules
        # Ranks that average nothing (the stages of a pipeline) may have modules of the same names.
        is_parallel = bool(self.groups & other.groups) or self.is_new or other.is_new
        return has_same and self.plugins <= other.plugins and is_parallel

    def is_like_rank_0(self, world_size: int) -> bool:
        """Whether the rank has the modules of a rank 0 on another node: in a job that is data-parallel only, all are in all groups."""
        return self.groups == {f"0-{world_size - 1}"} if self.groups else self.is_new
