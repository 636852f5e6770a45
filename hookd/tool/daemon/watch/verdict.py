"""Infer which ranks of a run wait for which, from the places where they stand.

Pure functions: no clock, no page, no process. There are three kinds of evidence, the strongest first. A stopped process waits
for no other. If the ranks have issued different numbers of collectives in one group, those that have issued more wait for the
others. Otherwise the positions of their CPU sides decide: a device works behind its CPU, so a rank may really be further back
than it looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.wire.module_names import described, names_above

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ORDER = {"data": 0, "forward": 1, "backward": 2, "collectives": 3, "optimizer": 4}
"""Phases in the order of a step; other phases may occur anywhere in it."""
MAX_RANKS = 8
"""Maximum number of ranks that a message names."""


@dataclass(frozen=True)
class RankPosition:
    """The place where one rank of a run stands.

    Attributes:
        rank: the label under which it is served.
        for_s: how long it has stood there, in seconds.
        at_least: whether it may be longer, because no event was seen before.
        phase: one of the page's PHASES.
        module: the name of the innermost module that it is in, None outside of all modules.
        type: the name of its class.
        place: the number of that module in the order of the model, 0 for none.
        model: a checksum of the names of all modules; numbers of modules are comparable only if it is the same.
        step: the number of the step in progress, counted from the attach unless `is_absolute`.
        state: of the process, as in /proc: "T" is stopped, "D" waits in the kernel.
        cpu: CPUs that it has used meanwhile, None if unknown.
        is_mute: whether the agent's own thread has not run either: the GIL is held.
        issued: the number of collectives that it has issued, by group; empty if unknown.
        ended: the reason of its end, None while it runs.
    """

    rank: str
    for_s: float = 0.0
    at_least: bool = False
    phase: str = "other"
    module: str | None = None
    type: str = ""
    place: int = 0
    model: int = 0
    step: int = 0
    is_absolute: bool = True
    state: str = ""
    cpu: float | None = None
    is_mute: bool = False
    issued: Mapping[str, float] = field(default_factory=dict)
    ended: str | None = None

    @property
    def where(self) -> str:
        """The place in words: phase, module and step, or how the process has ended."""
        if self.ended is not None:
            return f"has ended ({self.ended})"
        place = (
            "outside of forward, backward and optimizer"
            if self.phase == "other"
            else _PHASES.get(self.phase, self.phase)
        )
        module = f" of {described(self.module, self.type)}" if self.module else ""
        return f"in {place}{module} ({self.at})" if self.phase != "other" or module else f"{place} ({self.at})"

    @property
    def at(self) -> str:
        """The step in words."""
        return f"step {self.step}" + ("" if self.is_absolute else ", counted from the attach")

    @property
    def since(self) -> str:
        """The duration in words."""
        return f"for {'at least ' if self.at_least else ''}{self.for_s:.0f} s"


_PHASES = {"data": "the wait for data", "collectives": "the collectives of the backward"}
_STATES = {
    "T": "the process is stopped (by SIGSTOP, or held in a cgroup)",
    "t": "a debugger has stopped the process",
    "D": "it waits in the kernel (a disk, a network file system, a driver)",
}


@dataclass(frozen=True)
class Verdict:
    """The ranks that the others wait for.

    Attributes:
        guilty: the ranks that are waited for; without evidence, all that stand.
        waiting: the ranks that wait for them.
        basis: "process", "collectives", "cpu"; "alone" for a run of one rank, "unknown" without evidence.
        reason: the evidence in words, "" if the positions show it.
    """

    guilty: tuple[RankPosition, ...]
    waiting: tuple[RankPosition, ...] = ()
    basis: str = "alone"
    reason: str = ""


def judge(ranks: Sequence[RankPosition]) -> Verdict:
    """Return which ranks of a run are waited for, among those that stand or have ended.

    Args:
        ranks: at least one.
    """
    if len(ranks) == 1:
        return Verdict(tuple(ranks))
    stopped = [position for position in ranks if position.ended is not None or position.state in ("T", "t")]
    if stopped and len(stopped) < len(ranks):
        return _split(ranks, stopped, "process", "")
    guilty, why = _by_collectives(ranks)
    if guilty:
        return _split(ranks, guilty, "collectives", why)
    guilty = _by_position(ranks)
    if guilty:
        return _split(ranks, guilty, "cpu", "")
    return Verdict(tuple(ranks), basis="unknown", reason=_undecided(ranks))


def _split(ranks: Sequence[RankPosition], guilty: Sequence[RankPosition], basis: str, reason: str) -> Verdict:
    names = {position.rank for position in guilty}
    return Verdict(tuple(guilty), tuple(position for position in ranks if position.rank not in names), basis, reason)


def _by_collectives(ranks: Sequence[RankPosition]) -> tuple[list[RankPosition], str]:
    """Return the ranks that have issued the fewest collectives in a group and are not ahead in another, and the evidence."""
    behind: dict[str, str] = {}
    ahead: set[str] = set()
    for group in sorted({group for position in ranks for group in position.issued}):
        members = sorted(
            (position for position in ranks if group in position.issued and not position.is_mute),
            key=lambda position: position.issued[group],
        )
        last = [position for position in members if position.issued[group] == members[0].issued[group]]
        if len(last) == len(members):
            continue
        first = members[-1]
        why = f"{_are(last, 'has', 'have')} issued {last[0].issued[group]:.0f} collectives"
        why = f"of the group of ranks {group}, {why}, rank {first.rank} {first.issued[group]:.0f}"
        behind = {**{position.rank: why for position in last}, **behind}
        ahead |= {position.rank for position in members if position not in last}
    guilty = [position for position in ranks if position.rank in behind and position.rank not in ahead]
    return guilty, behind[guilty[0].rank] if guilty else ""


def _by_position(ranks: Sequence[RankPosition]) -> list[RankPosition]:
    """Return the ranks that are behind another rank and ahead of none."""
    places = {_place(position): position for position in ranks}  # with many ranks, most of them share one place
    behind = {key for key, position in places.items() if any(_is_behind(position, other) for other in places.values())}
    ahead = {key for key, position in places.items() if any(_is_behind(other, position) for other in places.values())}
    return [position for position in ranks if _place(position) in behind - ahead]


def _place(position: RankPosition) -> tuple[object, ...]:
    return (
        position.step if position.is_absolute else None,
        position.phase,
        position.module,
        position.place,
        position.model,
    )


def _is_behind(position: RankPosition, other: RankPosition) -> bool:
    """Whether the CPU side of `position` is certainly behind that of `other`."""
    if position.is_absolute and other.is_absolute and position.step != other.step:
        return position.step < other.step
    if position.phase == other.phase == "forward" and position.module and other.module:
        return position.model == other.model and not _are_nested(position, other) and position.place < other.place
    first, second = ORDER.get(position.phase), ORDER.get(other.phase)
    return first is not None and second is not None and first < second


def _are_nested(position: RankPosition, other: RankPosition) -> bool:
    """Whether the modules are the same, or one contains the other: then their order is unknown."""
    one, two = position.module or "", other.module or ""
    return one == two or one in names_above(two) or two in names_above(one)


def _undecided(ranks: Sequence[RankPosition]) -> str:
    issued = [set(position.issued.items()) for position in ranks]
    if issued[0] and all(collectives == issued[0] for collectives in issued):
        return "all have issued the same collectives: one of them does not complete, on a device or in the network"
    return "no evidence shows which rank the others wait for"


def sentence(verdict: Verdict, world_size: int = 1) -> str:
    """Return the verdict in words, in one or two sentences.

    Args:
        verdict: from `judge`.
        world_size: of the run; a rank that is unknown here may be the one that is waited for.
    """
    parts = [_clause(verdict.guilty, "stands", "stand")]
    if verdict.waiting:
        it = "it" if len(verdict.guilty) == 1 else "them"
        waiting = sorted(verdict.waiting, key=lambda position: position.where)
        parts.append(_clause(waiting, f"waits for {it}", f"wait for {it}", timed=False))
    known = len(verdict.guilty) + len(verdict.waiting)
    notes = [*_hints(verdict.guilty)]
    if verdict.reason:
        notes.append(verdict.reason)
    if verdict.basis == "cpu":
        notes.append("CPU side only: a device may be further behind")
    if world_size > known > 0:
        notes.append(f"{known} of {world_size} ranks hang here; the others are unknown here, or make progress")
    text, more = "; ".join(parts), "; ".join(notes)
    return f"{text}. {more[0].upper()}{more[1:]}" if more else text


def _clause(ranks: Iterable[RankPosition], one_does: str, several_do: str, *, timed: bool = True) -> str:
    """Return the places of ranks in words, grouped by place."""
    places: dict[str, list[RankPosition]] = {}
    for position in ranks:
        places.setdefault(position.where, []).append(position)
    clauses = []
    for where, together in places.items():
        if together[0].ended is not None:
            clauses.append(f"{_are(together, '', '')} {where}".replace("  ", " "))
            continue
        longest = max(together, key=lambda position: position.for_s)
        clauses.append(f"{_are(together, one_does, several_do)} {where}" + (f" {longest.since}" if timed else ""))
    return ", ".join(clauses)


def _are(ranks: Sequence[RankPosition], one_does: str, several_do: str) -> str:
    names = [position.rank for position in ranks]
    if len(names) == 1:
        return f"rank {names[0]} {one_does}"
    more = f" and {len(names) - MAX_RANKS} more" if len(names) > MAX_RANKS else ""
    return f"ranks {', '.join(names[:MAX_RANKS])}{more} {several_do}"


def _hints(ranks: Sequence[RankPosition]) -> list[str]:
    """Return the facts of the operating system on a rank, if it is the only one that stands."""
    if len(ranks) != 1 or ranks[0].ended is not None:
        return []
    (position,) = ranks
    if position.state in _STATES:
        return [_STATES[position.state]]
    busy = (
        []
        if position.cpu is None
        else [f"it uses {position.cpu:.1f} CPUs meanwhile" if position.cpu >= 0.05 else "it uses no CPU"]
    )
    mute = ["hookd's own thread there does not run either: the GIL is held"] if position.is_mute else []
    return [*mute, *busy]
