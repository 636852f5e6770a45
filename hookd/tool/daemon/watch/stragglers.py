"""Who is slow: the ranks of one run compared, by the time that each needs outside of waiting for the others.

Where gradients are averaged at each step all ranks have the same step time: who is quick waits for who is slow, in a
collective, most often at the end of the backward. So a straggler shows by what it does before: its data, its forward, its
optimizer, its other code. These are added up in the order of a step, in three stages: data; data and forward; all of
them. A rank is late at a stage by what it needs more up to there than the median of the other ranks, and as late as at
the stage where it is latest: a collective inside of the forward levels what came before it.

    score = 1 + lateness / median of all ranks' time outside of the backward

Where each rank stands is noted at each poll, and compared in blocks of some steps. A rank is a straggler if its lateness,
the median of those of the blocks of the last 20 s, is 8 % of the step and well above the noise, and three blocks in four
agree; of the last 30 steps, if it is 30 %. It is none any more once it is 4 % there.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.fleet import ranks
from hookd.tool.daemon.watch.watcher import Declared, Sample
from hookd.wire.module_names import is_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Family

    _Seconds = dict[Target, tuple[float, Family]]
    """Of each rank its steps, and its modules' forward seconds until then."""

PARTS = ("data", "forward", "optimizer", "other")
"""Phases of `hookd_timing_phase_seconds` that count as a rank's own time: all but the backward."""
STAGES = (1, 2, len(PARTS))
"""How many of the parts each stage adds up."""
BLOCK_STEPS, BLOCK_S = 5, 0.5
"""The least that two cuts are apart: a cut may fall into the middle of a step."""
FEWEST_BLOCKS, FEWEST_STEPS, FEWEST_S = 4, 30, 8.0
"""What a verdict needs; the seconds where it is not a clear one."""
MOST_BLOCKS, MOST_S = 8, 20.0
"""How far back it looks, whichever is longer: a core that is busy with something else for some seconds makes no straggler."""
SHARE, CLEAR, LEAST_S = 0.08, 0.3, 0.001
"""Lateness that makes a straggler, of the step (clear is what is enough in a few blocks) and in seconds. Healthy ranks under load reach 6.5 % over 8 s."""
MARK_BLOCKS, MARKS = 2, 2
"""The oldest mark is two or three blocks ago, of the four at least that a verdict needs."""
AGREE = 0.75
"""Of the blocks of a window, so many show at least half of that lateness."""
CERTAIN = 3.5
"""Lateness over its standard error that makes a straggler. In healthy ranks with 8 % it was 3.2, in slow ones 4.6 or more."""
UNEVEN = 0.1
"""Ranks whose numbers of steps in a block differ by more do not wait for each other."""

SCORE = Declared(
    "hookd_straggler_score",
    "gauge",
    "Time that the rank needs in a step outside of waiting, over the median of the run's ranks on this node.",
)
SLOW = Declared("hookd_straggler", "gauge", "1 for a rank that the others of its run wait for, step by step.")
TOLD, OVER = "straggler", "straggler_over"
"""Kinds of incidents."""


class Cut(NamedTuple):
    """Where a rank stands: optimizer steps, seconds by PARTS, and those of all phases, since the attach."""

    steps: float
    parts: tuple[float, ...]
    total_s: float


class Share(NamedTuple):
    """What a step of a rank took in one block: seconds by PARTS, and in all; `late` by PARTS, `behind` by STAGES.

    These two are what it needs more than the median of the other ranks.
    """

    parts: tuple[float, ...]
    total_s: float
    late: tuple[float, ...]
    behind: tuple[float, ...]


class Verdict(NamedTuple):
    """What is known of a rank. `part` is the one of PARTS in which it is latest, with its and the others' seconds a step.

    `noise_s` is the standard error of `late_s`, `agreeing` the share of blocks that show half of what makes a straggler.
    `is_well` says of one that was a straggler that it is none any more.
    """

    score: float
    late_s: float
    noise_s: float
    step_s: float
    agreeing: float
    part: str
    part_s: float
    others_s: float
    is_slow: bool
    is_well: bool


class Run:
    """The ranks of a run, over the last blocks of steps. Whoever joins or leaves makes it begin anew.

    Attributes:
        members: its ranks.
        calm: the modules' forward seconds of each rank, as of the last block after which nobody was late.
        marks: the same as of the last blocks, one in MARK_BLOCKS; where ranks have been uneven for long, calm is too long ago.
    """

    def __init__(self, members: Sequence[Target]) -> None:
        self.members = tuple(members)
        self.calm: _Seconds = {}
        self.marks: deque[_Seconds] = deque(maxlen=MARKS)
        self._blocks: deque[_Block] = deque()
        self._last: Mapping[Target, Cut] = {}
        self._since, self._seen = 0.0, 0

    def see(self, cuts: Mapping[Target, Cut], now: float) -> bool:
        """Take where the ranks stand; says whether that has made a block."""
        steps = [cut.steps - self._last[one].steps for one, cut in cuts.items() if one in self._last]
        if len(steps) < len(self.members) or min(steps) < 0:
            return self._begin(cuts, now)
        if min(steps) < BLOCK_STEPS or now - self._since < BLOCK_S:
            return False
        if max(steps) - min(steps) > max(2.0, UNEVEN * max(steps)):
            return self._begin(cuts, now)
        self._blocks.append(_Block(min(steps), now - self._since, _compared(self._last, cuts)))
        while (
            len(self._blocks) > MOST_BLOCKS
            and sum(one.seconds for one in self._blocks) - self._blocks[0].seconds > MOST_S
        ):
            self._blocks.popleft()
        self._last, self._since = cuts, now
        self._seen += 1
        if self._seen % MARK_BLOCKS == 0:
            self.marks.append(_modules(cuts))
        return True

    @property
    def is_new(self) -> bool:
        """Whether there is no block yet."""
        return not self._blocks

    def _begin(self, cuts: Mapping[Target, Cut], now: float) -> bool:
        self._blocks.clear()
        self.calm.clear()
        self.marks.clear()
        self._last, self._since = (cuts if len(cuts) == len(self.members) else {}), now
        return False

    def verdicts(self) -> dict[Target, Verdict]:
        """Judge every rank; nothing as long as too little was seen."""
        blocks = list(self._blocks)
        count = next((n for n in range(FEWEST_BLOCKS, len(blocks) + 1) if _steps(blocks[-n:]) >= FEWEST_STEPS), 0)
        if not count:
            return {}
        recent = self._judged(blocks[-count:], CLEAR)
        if sum(one.seconds for one in blocks) < FEWEST_S:
            return recent
        whole = self._judged(blocks, SHARE)
        return {
            one: verdict if verdict.is_slow else whole[one]._replace(is_well=verdict.is_well)
            for one, verdict in recent.items()
        }

    def _judged(self, blocks: Sequence[_Block], share: float) -> dict[Target, Verdict]:
        rows = {one: [block.shares[one] for block in blocks] for one in self.members}
        typical_s = statistics.median(statistics.median(sum(part.parts) for part in row) for row in rows.values())
        noise_s = _noise_s([[part.behind[-1] for part in row] for row in rows.values()])
        return {one: _judge(row, share, typical_s, noise_s) for one, row in rows.items()}

    def forget(self) -> None:
        """Look back no further than to now."""
        self._blocks.clear()


class _Block(NamedTuple):
    """Some steps of all ranks: the fewest that one took, how long it lasted, and what a step took on each."""

    steps: float
    seconds: float
    shares: Mapping[Target, Share]


def _steps(blocks: Sequence[_Block]) -> float:
    return sum(block.steps for block in blocks)


def _compared(before: Mapping[Target, Cut], now: Mapping[Target, Cut]) -> dict[Target, Share]:
    """Give what a step took between two cuts, and compare."""
    members = list(now)
    steps = [now[one].steps - before[one].steps for one in members]
    by_part = [
        [max(0.0, now[one].parts[at] - before[one].parts[at]) / n for one, n in zip(members, steps, strict=True)]
        for at in range(len(PARTS))
    ]
    late = [_late(row) for row in by_part]
    behind = [_late([sum(parts) for parts in zip(*by_part[:stage], strict=True)]) for stage in STAGES]
    columns = zip(
        members, steps, zip(*by_part, strict=True), zip(*late, strict=True), zip(*behind, strict=True), strict=True
    )
    return {
        one: Share(parts, max(0.0, now[one].total_s - before[one].total_s) / n, own_late, own_behind)
        for one, n, parts, own_late, own_behind in columns
    }


def _late(seconds: Sequence[float]) -> list[float]:
    """Give what each needs more than the median of the others."""
    ordered = sorted(seconds)
    return [own - _median_without(ordered, bisect_left(ordered, own)) for own in seconds]


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Give the median of ascending numbers without the one at `place`: for hundreds of ranks, too, in no time."""
    last = len(ordered) - 1
    middle = ((last - 1) // 2, last // 2)  # among those that are left
    low, high = (ordered[at + (at >= place)] for at in middle)
    return (low + high) / 2


def _noise_s(late: Sequence[Sequence[float]]) -> float:
    """Estimate the standard error of the median lateness, from how that of each rank varies from block to block.

    With the median absolute deviation, 1.4826 of which is the standard deviation of a normal distribution; the median of n
    such values has the standard error 1.2533 deviations over the root of n.
    """
    middles = [statistics.median(row) for row in late]
    deviations = [abs(value - middle) for row, middle in zip(late, middles, strict=True) for value in row]
    return 1.4826 * 1.2533 * statistics.median(deviations) / math.sqrt(len(late[0]))


def _judge(row: Sequence[Share], threshold: float, typical_s: float, noise_s: float) -> Verdict:
    """Judge a rank by its shares of some blocks; `typical_s` is the median of all ranks' own time."""
    step_s = statistics.median(share.total_s for share in row)
    at_stages = [statistics.median(share.behind[k] for share in row) for k in range(len(STAGES))]
    late_s = max(at_stages)
    stage = at_stages.index(late_s)
    enough_s = max(threshold * step_s, LEAST_S)
    half_s = max(SHARE * step_s, LEAST_S) / 2
    agreeing = sum(share.behind[stage] >= enough_s / 2 for share in row) / len(row)
    at = max(range(STAGES[stage]), key=lambda at: statistics.median(share.late[at] for share in row))
    return Verdict(
        score=1 + late_s / typical_s if typical_s > 0 else 1.0,
        late_s=late_s,
        noise_s=noise_s,
        step_s=step_s,
        agreeing=agreeing,
        part=PARTS[at],
        part_s=statistics.median(share.parts[at] for share in row),
        others_s=statistics.median(share.parts[at] - share.late[at] for share in row),
        is_slow=late_s >= max(enough_s, CERTAIN * noise_s) and agreeing >= AGREE,
        is_well=late_s < half_s,
    )


class Stragglers:
    """Watches the ranks of every run.

    Args:
        fleet: is told of a straggler, and when it is none any more.
        clock: monotonic seconds.
    """

    families: Sequence[Declared] = (SCORE, SLOW)

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._verdicts: dict[Target, tuple[float, bool]] = {}

    def look(self, targets: Sequence[Target]) -> None:
        """Note where each rank stands, and judge; see `watch.Watcher`."""
        found = ranks.by_run(targets)
        self._runs = {run: self._run(run, members) for run, members in found.items()}
        living = {one for members in found.values() for one in members}
        self._verdicts = {one: verdict for one, verdict in self._verdicts.items() if one in living}
        for run in self._runs.values():
            cuts = {one: cut for one in run.members if (cut := cut_of(one)) is not None}
            if run.see(cuts, self._clock()):
                self._settle(run, cuts)
            elif run.is_new:
                self._verdicts = {one: known for one, known in self._verdicts.items() if one not in run.members}
                if not run.calm and len(cuts) == len(run.members):
                    run.calm = _modules(cuts)

    def _run(self, name: str, members: Sequence[Target]) -> Run:
        known = self._runs.get(name)
        return known if known is not None and known.members == tuple(members) else Run(members)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Give the score of a rank, once there is one; see `watch.Watcher`."""
        known = self._verdicts.get(target)
        return () if known is None else (Sample(SCORE, {}, known[0]), Sample(SLOW, {}, float(known[1])))

    def _settle(self, run: Run, cuts: Mapping[Target, Cut]) -> None:
        verdicts = run.verdicts()
        was = {one: self._is_told(one) for one in verdicts}
        slow = {one for one, known in verdicts.items() if known.is_slow or (was[one] and not known.is_well)}
        for one, verdict in verdicts.items():
            if one in slow and not was[one]:
                self._tell(run, one, verdict, cuts, [other for other in run.members if other not in slow])
            elif was[one] and one not in slow:
                message = f"rank {one.claim.rank} is as quick as the others again"
                self._fleet.tell(one, OVER, message, step=ranks.step_of(one, cuts[one].steps))
                run.forget()
        self._verdicts |= {one: (verdict.score, one in slow) for one, verdict in verdicts.items()}
        if not any(verdict.agreeing >= 0.5 and verdict.late_s >= LEAST_S for verdict in verdicts.values()):
            run.calm = _modules(cuts)

    @staticmethod
    def _is_told(one: Target) -> bool:
        """Whether it was told of, and not yet that it is over: by this daemon or by one before it."""
        return TOLD in one.ongoing

    def _tell(
        self, run: Run, one: Target, known: Verdict, cuts: Mapping[Target, Cut], waiting: Sequence[Target]
    ) -> None:
        ratio = f"{known.part_s / known.others_s:.1f} x" if known.others_s > 1e-4 else "more than"
        late_s, module = known.part_s - known.others_s, None
        if known.part == "forward":
            bases = (run.calm, *run.marks)
            module = next(filter(None, (slow_module(base, run.members, one, cuts, late_s) for base in bases)), None)
        fields: dict[str, object] = {
            "step": ranks.step_of(one, cuts[one].steps),
            "part": known.part,
            "seconds": known.part_s,
            "median_seconds": known.others_s,
            "score": known.score,
        }
        where = ""
        if module is not None:
            name, own_s, others_s = module
            fields |= {"module": name, "module_seconds": own_s, "module_median_seconds": others_s}
            where = f", {name} {_ms(own_s)} instead of {_ms(others_s)}"
        message = (
            f"rank {one.claim.rank} needs {ratio} the other ranks' time in {known.part}: {_ms(known.part_s)} a step "
            f"instead of {_ms(known.others_s)}{where}; {ranks.named(waiting)} {'wait' + 's' * (len(waiting) == 1)} for it"
        )
        self._fleet.tell(one, TOLD, message, **fields)


def cut_of(target: Target) -> Cut | None:
    """Give where a rank stands; None where nobody measures the phases there, or the page says nonsense."""
    snapshot = target.last()
    if snapshot is None:
        return None
    found = ranks.family(snapshot, "hookd_timing_phase_seconds", ("phase",))
    phases, steps = ranks.counts(found), ranks.counts(ranks.family(snapshot, "hookd_steps", ()))
    if found is None or not phases or len(phases) < len(found.values) or "" not in steps:
        return None
    return Cut(steps[""], tuple(phases.get(part, 0.0) for part in PARTS), sum(phases.values()))


def modules_of(target: Target) -> Family | None:
    """Give the modules' forward seconds of a rank."""
    snapshot = target.last()
    return None if snapshot is None else ranks.family(snapshot, "hookd_timing_forward_seconds", ("module",))


def _modules(cuts: Mapping[Target, Cut]) -> _Seconds:
    """Give for each rank its steps, and its modules' seconds until then."""
    return {one: (cut.steps, family) for one, cut in cuts.items() if (family := modules_of(one)) is not None}


def slow_module(
    base: _Seconds, members: Sequence[Target], one: Target, cuts: Mapping[Target, Cut], late_s: float
) -> tuple[str, float, float] | None:
    """Find the innermost module that makes a rank late since `base`: most of its lateness in the forward comes from there.

    Returns:
        Its name, and the seconds a step that it takes on this rank and, in the median, on the others.
    """
    steps: dict[Target, dict[str, float]] = {}
    for member in members:
        now = modules_of(member)
        if now is None or member not in base:
            return None
        since, before = base[member]
        passed = cuts[member].steps - since
        if passed <= 0:
            return None
        earlier = ranks.counts(before)
        steps[member] = {name: (s - earlier.get(name, 0.0)) / passed for name, s in ranks.counts(now).items()}
    others = [steps[other] for other in members if other is not one]
    typical = {name: statistics.median(other.get(name, 0.0) for other in others) for name in steps[one]}
    late = [name for name in steps[one] if not is_root(name) and steps[one][name] - typical[name] >= late_s / 2]
    if not late:
        return None
    name = max(
        late, key=lambda name: (name.count("."), steps[one][name] - typical[name])
    )  # what contains it is late, too
    return name, steps[one][name], typical[name]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
