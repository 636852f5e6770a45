"""Find replicas that part: ranks of a run whose gradients and weights were equal in a step, and then are not.

Ranks that never were equal, such as the shards of a model, are not compared.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from hookd.errors import HookdError
from hookd.tool.daemon.fingerprints.kept import SHARED, agreement
from hookd.tool.daemon.fleet import ranks
from hookd.tool.daemon.watch.watcher import Declared, Sample
from hookd.tool.fingerprints import comparison, file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.daemon.fingerprints.kept import Kept
    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target

PARTED = Declared(
    "hookd_fingerprint_parted",
    "gauge",
    "1 for a rank whose gradients or weights were equal to those of most others in a step, and are not any more.",
)
KIND, OVER = "parted", "parted_over"
"""The kinds of its incidents."""
_log = logging.getLogger(__name__)


class _Group(NamedTuple):
    """Ranks of a run that were equal once.

    Attributes:
        right: the largest group of ranks that are still equal, with the first rank of equally large ones.
        odd: the others.
        is_even: whether as many ranks are odd in the same way as are right.
    """

    right: Sequence[Target]
    odd: Sequence[Target]
    is_even: bool


class Parted:
    """Compares the fingerprints of the ranks of each run, and reports those that part.

    Args:
        fleet: to which they are reported.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._is_odd: dict[Target, bool] = {}

    def samples(self, target: Target) -> Iterable[Sample]:
        """Return whether a rank has parted, once it was compared."""
        known = self._is_odd.get(target)
        return () if known is None else (Sample(PARTED, {}, float(known)),)

    def compare(self, kept: Mapping[Target, Kept]) -> None:
        """Compare the living ranks of each run."""
        self._is_odd = {target: is_odd for target, is_odd in self._is_odd.items() if target in kept}
        for members in ranks.by_run(kept).values():
            for group in _compared(members, kept):
                self._settle(group, kept)

    def _settle(self, group: _Group, kept: Mapping[Target, Kept]) -> None:
        for target in group.right:
            self._is_odd[target] = group.is_even
            if KIND in target.ongoing:
                message = f"rank {target.claim.rank} is equal to the others again"
                self._fleet.report(target, OVER, message, step=_last(kept[target]))
        for target in group.odd:
            self._is_odd[target] = True
            if KIND not in target.ongoing:
                self._report(group, target, kept)

    def _report(self, group: _Group, target: Target, kept: Mapping[Target, Kept]) -> None:
        right, odd = kept[group.right[0]], kept[target]
        how = agreement(odd, right)  # in the numbers of the rank that has parted
        where = _explained(right, odd, agreement(right, odd).equal or 0, how.equal or 0)
        said = "" if where is None else f" With rank {right.rank} as A and rank {odd.rank} as B: {where.sentence}"
        even = " As many ranks are on either side, so it is unknown which are right." if group.is_even else ""
        message = (
            f"rank {target.claim.rank} has parted from {ranks.named(group.right)} at step {how.parted}; they were equal at step "
            f"{how.equal}.{said}{even}"
        )
        fields: dict[str, object] = {
            "phase": "" if where is None else where.phase,
            "parameter": "" if where is None else where.name,
            "advice": "" if where is None else where.advice,
            "ranks": [one.claim.rank for one in ranks.in_order(group.odd)],
            "agreed_at_step": how.equal,
            "files": [str(right.path), str(odd.path)],
        }
        self._fleet.report(target, KIND, message, step=how.parted or 0, **fields)


def _last(kept: Kept) -> int:
    last = kept.last()
    return 0 if last is None else last[0]


def _compared(members: Sequence[Target], kept: Mapping[Target, Kept]) -> list[_Group]:
    """Sort the ranks of a run into those that were equal once, and these into those that still are."""
    families: list[list[list[Target]]] = []
    for target in members:
        if not any(_takes(family, target, kept) for family in families):
            families.append([[target]])
    return [_group(family) for family in families if sum(map(len, family)) > 1]


def _takes(family: list[list[Target]], target: Target, kept: Mapping[Target, Kept]) -> bool:
    """Add a rank to those that were equal once, in groups of those that still are, unless it never was."""
    found = [(group, agreement(kept[group[0]], kept[target])) for group in family]
    if all(how.equal is None for _, how in found):
        return False
    group = next((group for group, how in found if how.equal is not None and how.parted is None), None)
    if group is None:
        family.append([target])
    else:
        group.append(target)
    return True


def _group(family: list[list[Target]]) -> _Group:
    """Return who is right, which is the largest group."""
    groups = sorted(family, key=len, reverse=True)  # it keeps the order of ranks for groups of one size
    odd = [target for group in groups[1:] for target in group]
    return _Group(groups[0], odd, len(groups) > 1 and len(groups[0]) == len(groups[1]))


def _explained(right: Kept, odd: Kept, agreed: int, agreed_by_odd: int) -> comparison.Comparison | None:
    """Compare the files from the last equal step on, which each rank counts in its own way; None if that finds nothing."""
    try:
        one, other = file.read(right.path, agreed), file.read(odd.path, agreed_by_odd)
    except (HookdError, OSError) as exc:
        _log.warning("the fingerprints of two replicas cannot be compared: %s", exc)
        return None
    found = comparison.compare(one, other, comparison.Terms(phases=SHARED | {"weights"}))
    return found if found.code == comparison.DIFFERENT else None
