"""The ranks of one run on this node, and checked numbers from their pages.

The numbers are checked because the pages belong to other processes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hookd.tool.reports.reading import INFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Family, Snapshot

MOST = 2.0**53
"""Upper limit of all counts, checksums and sums of seconds."""


def by_run(targets: Iterable[Target]) -> dict[str, list[Target]]:
    """Return the living ranks by run, for each run with several ranks here."""
    runs: dict[str, list[Target]] = {}
    for target in targets:
        if target.ended is None and target.identity.world_size > 1:
            runs.setdefault(target.claim.run, []).append(target)
    return {run: in_order(ranks) for run, ranks in runs.items() if len(ranks) > 1}


def in_order(ranks: Iterable[Target]) -> list[Target]:
    """Return ranks by their number."""
    return sorted(ranks, key=_order)


def first_of_runs(targets: Iterable[Target]) -> list[Target]:
    """Return the living rank with the lowest number of each run."""
    first: dict[str, Target] = {}
    for target in targets:
        known = first.get(target.claim.run)
        if target.ended is None and (known is None or _order(target) < _order(known)):
            first[target.claim.run] = target
    return list(first.values())


def _order(target: Target) -> tuple[int, str, int]:
    rank = target.claim.rank
    return (int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 20 else 0, rank, target.pid)


def named(ranks: Iterable[Target]) -> str:
    """Return the names of ranks for a person: `rank 1`, `ranks 0, 2, 3`."""
    names = [target.claim.rank for target in sorted(ranks, key=_order)]
    shown = [*names[:8], f"{len(names) - 8} more"] if len(names) > 9 else names
    return f"rank{'s' * (len(names) != 1)} {', '.join(shown)}"


def family(snapshot: Snapshot, name: str, labels: tuple[str, ...]) -> Family | None:
    """Return the family with this name and these labels; None without one."""
    return next((family for family in snapshot.families if family.name == name and family.labels == labels), None)


def scalar(snapshot: Snapshot, name: str) -> float:
    """Return the value of a family without labels; NaN without one."""
    gauge = family(snapshot, name, ())
    return gauge.cells[gauge.first[0]] if gauge is not None and gauge.first else math.nan


def counts(family: Family | None) -> dict[str, float]:
    """Return the values of a family with at most one label, by the label's value.

    Values that cannot be counts are left out.
    """
    if family is None:
        return {}
    values = (
        (labels[0] if labels else "", family.cells[at]) for labels, at in zip(family.values, family.first, strict=True)
    )
    return {label: value for label, value in values if math.isfinite(value) and 0 <= value < MOST}


def phase_seconds(target: Target) -> tuple[float, dict[str, float]] | None:
    """Return a rank's number of optimizer steps, and its seconds by phase, both since the attach.

    Inference is left out: it is not part of a step, and often only one rank runs it.

    Returns:
        None if the phases are not measured, or the page is invalid.
    """
    snapshot = target.last()
    if snapshot is None:
        return None
    phase_family = family(snapshot, "hookd_timing_phase_seconds", ("phase",))
    phases, steps = counts(phase_family), counts(family(snapshot, "hookd_steps", ()))
    if phase_family is None or not phases or len(phases) < len(phase_family.values) or "" not in steps:
        return None
    phases.pop(INFERENCE, None)
    return steps[""], phases


def step_of(target: Target, steps: float) -> int:
    """Return a step's number within the run, from the agent's count."""
    return int(steps) + (target.identity.step_offset or 0)
