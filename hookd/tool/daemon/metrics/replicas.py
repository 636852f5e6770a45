"""Find the ranks whose modules another rank of their run serves.

The ranks of a data-parallel job have the same modules and do the same work, so a thousand of them would serve the same series a
thousand times. Ranks that have other modules (the stages of a pipeline) serve theirs.
"""

from __future__ import annotations

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
        served: list[frozenset[tuple[str, str]]] = []
        for target in members:
            modules = _modules(target.last())
            # A page lists modules as they are first called, so one of two replicas may lack some for a moment.
            is_replica = not modules or any(modules <= others or modules >= others for others in served)
            if is_replica or (self._is_fleet and members[0].claim.rank != "0" and _is_like_rank_0(target)):
                yield target
            else:
                served.append(modules)


def _modules(snapshot: Snapshot | None) -> frozenset[tuple[str, str]]:
    entries = snapshot.modules.values() if snapshot is not None else ()
    return frozenset((entry.name, entry.type) for entry in entries)


def _is_like_rank_0(target: Target) -> bool:
    """Whether a rank has the modules of a rank 0 on another node, by the groups in which it issues collectives.

    In a job that is data-parallel only, all ranks are in all groups.
    """
    snapshot, whole = target.last(), f"0-{target.identity.world_size - 1}"
    if snapshot is None:
        return True
    groups = ranks.counts(ranks.family(snapshot, "hookd_collectives", ("group",)))
    used = {group.partition("#")[0] for group, issued in groups.items() if issued}
    return (
        used == {whole} if used else not ranks.scalar(snapshot, "hookd_steps") >= PATIENCE
    )  # NaN before the first step
