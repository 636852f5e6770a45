"""Find stragglers: compare the ranks of a run by the time that each spends outside of waiting for the others.

If gradients are averaged at each step, all ranks have the same step time: the fast ranks wait for the slow one in a
collective, usually at the end of the backward. A straggler therefore shows in the time that it spends before the
collective: on data, in the forward, in the optimizer and in other code. These times are added up in the order of a step,
in three stages: data; data and forward; all of them. The lateness of a rank at a stage is its time up to there minus the
median of the other ranks. The maximum over the stages counts, because a collective inside the forward hides any lateness
before it.

    score = 1 + lateness / median of all ranks' time outside of the backward

The progress of each rank is recorded at each poll, and compared in blocks of several steps. A rank is a straggler if the
median lateness of its blocks in the last 20 s is at least 8 % of the step and well above the noise, and three blocks in
four agree. Over the last 30 steps, the threshold is 30 %. A straggler has recovered once its lateness over those steps is
below 4 %.
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
from hookd.tool.reports.reading import WAITS
from hookd.tool.reports.wording import seconds as duration
from hookd.wire.module_names import is_root

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Family

    _Seconds = dict[Target, tuple[float, Family]]
    """By rank: its steps, and its modules' forward seconds until then."""

PARTS = ("data", "forward", "optimizer", "other")
"""Phases of `hookd_timing_phase_seconds` that count as a rank's own time: all of a step except the backward."""
STAGES = (1, 2, len(PARTS))
"""A judgement has a stage for each N here, which adds up the time in the first N of PARTS."""
BLOCK_STEPS, BLOCK_S = 5, 0.5
"""Minimum distance between two cuts, in steps and in seconds, because a cut may fall into the middle of a step."""
FEWEST_BLOCKS, FEWEST_STEPS, FEWEST_S = 4, 30, 8.0
"""Minimum data for a judgement; `FEWEST_S` does not apply to a clear one."""
MOST_BLOCKS, MOST_S = 8, 20.0
"""Length of the window, whichever is longer: a core that is busy with other work for some seconds must not make a straggler."""
SHARE, CLEAR, LEAST_S = 0.08, 0.3, 0.001
"""Minimum lateness of a straggler, as a share of the step and in seconds; in a few blocks, it must be `CLEAR`.

Healthy ranks under load reach 6.5 % over 8 s.
"""
BASE_BLOCKS, BASES = 2, 2
"""The oldest base is two or three blocks old; a judgement needs at least four blocks."""
AGREE = 0.75
"""Minimum share of the window's blocks in which the rank is at least half as late."""
CERTAIN = 3.5
"""Minimum ratio of a straggler's lateness to its standard error.

Healthy ranks with a lateness of 8 % reached 3.2; slow ranks had at least 4.6.
"""
UNEVEN = 0.1
"""Ranks do not wait for each other if their numbers of steps in a block differ by more than this share."""

SCORE = Declared(
    "hookd_straggler_score",
    "gauge",
    "Time that the rank needs in a step outside of waiting, over the median of the run's ranks on this node.",
)
SLOW = Declared("hookd_straggler", "gauge", "1 if the other ranks of the run wait for this rank in every step, else 0.")
STRAGGLER, OVER = "straggler", "straggler_over"
"""The kinds of its incidents."""


class Cut(NamedTuple):
    """The progress of a rank since the attach: optimizer steps, seconds by PARTS, and seconds of all phases."""

    steps: float
    parts: tuple[float, ...]
    total_s: float


class Share(NamedTuple):
    """The time of a rank's step in one block: seconds by PARTS, and in total.

    `late` (by PARTS) and `behind` (by STAGES) are the seconds by which the rank exceeds the median of the other ranks.
    """

    parts: tuple[float, ...]
    total_s: float
    late: tuple[float, ...]
    behind: tuple[float, ...]


class Lateness(NamedTuple):
    """How late a rank is.

    `part` is the one of PARTS in which the rank is latest; `part_s` and `others_s` are its own and the others' seconds per
    step there. `noise_s` is the standard error of `late_s`. `agreeing` is the share of blocks that show half of the
    lateness that makes a straggler. `is_well`: a rank that was a straggler has recovered.
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
    """The ranks of a run, over the last blocks of steps.

    A run whose ranks change starts over.

    Attributes:
        members: its ranks.
        calm: the modules' forward seconds of each rank, as of the last block after which no rank was late.
        bases: the same as of the last blocks, one in BASE_BLOCKS; used if `calm` is too old, because the ranks have been
            uneven for long.
        waits: the phases among PARTS in which the ranks issue collectives, and so may wait for each other.
    """

    def __init__(self, members: Sequence[Target]) -> None:
        self.members = tuple(members)
        self.waits: frozenset[str] = frozenset()
        self.calm: _Seconds = {}
        self.bases: deque[_Seconds] = deque(maxlen=BASES)
        self._blocks: deque[_Block] = deque()
        self._last: Mapping[Target, Cut] = {}
        self._since, self._seen = 0.0, 0

    def see(self, cuts: Mapping[Target, Cut], now: float) -> bool:
        """Take the progress of the ranks; return whether this completes a block."""
        steps = [cut.steps - self._last[target].steps for target, cut in cuts.items() if target in self._last]
        if len(steps) < len(self.members) or min(steps) < 0:
            return self._begin(cuts, now)
        if min(steps) < BLOCK_STEPS or now - self._since < BLOCK_S:
            return False
        if max(steps) - min(steps) > max(2.0, UNEVEN * max(steps)):
            return self._begin(cuts, now)
        shares = _compared(self._last, cuts)
        certain = _compared(self._last, cuts, self.waits) if self.waits else shares
        self._blocks.append(_Block(min(steps), now - self._since, shares, certain))
        while (
            len(self._blocks) > MOST_BLOCKS
            and sum(block.seconds for block in self._blocks) - self._blocks[0].seconds > MOST_S
        ):
            self._blocks.popleft()
        self._last, self._since = cuts, now
        self._seen += 1
        if self._seen % BASE_BLOCKS == 0:
            self.bases.append(_modules(cuts))
        return True

    @property
    def is_new(self) -> bool:
        """Whether there is no block yet."""
        return not self._blocks

    def _begin(self, cuts: Mapping[Target, Cut], now: float) -> bool:
        self._blocks.clear()
        self.calm.clear()
        self.bases.clear()
        self._last, self._since = (cuts if len(cuts) == len(self.members) else {}), now
        return False

    def note_waits(self, phases: Iterable[str]) -> None:
        """Note in which phases the ranks may wait for each other. A change starts over."""
        waits = frozenset(phases)
        if waits != self.waits:
            self.waits = waits
            self._begin({}, 0.0)

    def lateness(self) -> dict[Target, Lateness]:
        """Judge every rank; return nothing until there is enough data."""
        blocks = list(self._blocks)
        count = next((n for n in range(FEWEST_BLOCKS, len(blocks) + 1) if _steps(blocks[-n:]) >= FEWEST_STEPS), 0)
        if not count:
            return {}
        recent = self._judged(blocks[-count:], CLEAR)
        if sum(block.seconds for block in blocks) < FEWEST_S:
            return recent
        whole = self._judged(blocks, SHARE)
        return {
            target: late if late.is_slow else whole[target]._replace(is_well=late.is_well)
            for target, late in recent.items()
        }

    def _judged(self, blocks: Sequence[_Block], share: float) -> dict[Target, Lateness]:
        """Judge every rank by its own time.

        A phase with collectives may be long because another rank was late before it. So a rank that is late outside of these
        phases decides; only if there is none, all phases count.
        """
        if self.waits:
            lateness = self._judged_by([block.certain for block in blocks], share)
            if not all(late.is_well for late in lateness.values()):
                return lateness
        return self._judged_by([block.shares for block in blocks], share)

    def _judged_by(self, blocks: Sequence[Mapping[Target, Share]], share: float) -> dict[Target, Lateness]:
        rows = {target: [block[target] for block in blocks] for target in self.members}
        typical_s = statistics.median(statistics.median(sum(part.parts) for part in row) for row in rows.values())
        noise_s = _noise_s([[part.behind[-1] for part in row] for row in rows.values()])
        return {target: _judge(row, share, typical_s, noise_s) for target, row in rows.items()}

    def forget(self) -> None:
        """Drop the blocks so far: later judgements look back to now, and no further."""
        self._blocks.clear()


class _Block(NamedTuple):
    """Several steps of all ranks: the number of steps (the minimum over the ranks), the duration, and each rank's share.

    `certain` are the shares without the phases in which ranks may wait for each other.
    """

    steps: float
    seconds: float
    shares: Mapping[Target, Share]
    certain: Mapping[Target, Share]


def _steps(blocks: Sequence[_Block]) -> float:
    return sum(block.steps for block in blocks)


def _compared(
    before: Mapping[Target, Cut], now: Mapping[Target, Cut], without: Collection[str] = ()
) -> dict[Target, Share]:
    """Compare the ranks by the time of a step between two cuts, `without` some phases."""
    members = list(now)
    steps = [now[target].steps - before[target].steps for target in members]
    by_part = [
        [
            0.0 if part in without else max(0.0, now[target].parts[at] - before[target].parts[at]) / n
            for target, n in zip(members, steps, strict=True)
        ]
        for at, part in enumerate(PARTS)
    ]
    late = [_late(row) for row in by_part]
    behind = [_late([sum(parts) for parts in zip(*by_part[:stage], strict=True)]) for stage in STAGES]
    columns = zip(
        members, steps, zip(*by_part, strict=True), zip(*late, strict=True), zip(*behind, strict=True), strict=True
    )
    return {
        target: Share(parts, max(0.0, now[target].total_s - before[target].total_s) / n, own_late, own_behind)
        for target, n, parts, own_late, own_behind in columns
    }


def _late(seconds: Sequence[float]) -> list[float]:
    """Return the difference of each value from the median of the others."""
    ordered = sorted(seconds)
    return [own - _median_without(ordered, bisect_left(ordered, own)) for own in seconds]


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of ascending numbers, without the number at `place`, in constant time."""
    last = len(ordered) - 1
    middle = ((last - 1) // 2, last // 2)  # among the remaining numbers
    low, high = (ordered[at + (at >= place)] for at in middle)
    return (low + high) / 2


def _noise_s(late: Sequence[Sequence[float]]) -> float:
    """Estimate the standard error of the median lateness from each rank's variation between blocks.

    The standard deviation of a normal distribution is 1.4826 times its median absolute deviation. The median of n such values
    has a standard error of 1.2533 standard deviations divided by the square root of n.
    """
    middles = [statistics.median(row) for row in late]
    deviations = [abs(value - middle) for row, middle in zip(late, middles, strict=True) for value in row]
    return 1.4826 * 1.2533 * statistics.median(deviations) / math.sqrt(len(late[0]))


def _judge(row: Sequence[Share], threshold: float, typical_s: float, noise_s: float) -> Lateness:
    """Judge a rank by its shares of some blocks; `typical_s` is the median of all ranks' own time."""
    step_s = statistics.median(share.total_s for share in row)
    at_stages = [statistics.median(share.behind[k] for share in row) for k in range(len(STAGES))]
    late_s = max(at_stages)
    stage = at_stages.index(late_s)
    enough_s = max(threshold * step_s, LEAST_S)
    half_s = max(SHARE * step_s, LEAST_S) / 2
    agreeing = sum(share.behind[stage] >= enough_s / 2 for share in row) / len(row)
    at = max(range(STAGES[stage]), key=lambda at: statistics.median(share.late[at] for share in row))
    return Lateness(
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
    """Watches the ranks of every run; reports stragglers and their recovery."""

    families: Sequence[Declared] = (SCORE, SLOW)

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._judged_before: dict[Target, tuple[float, bool]] = {}

    def poll(self, targets: Sequence[Target]) -> None:
        """Record the progress of each rank, and judge the runs; see `watch.Watcher`."""
        by_run = ranks.by_run(targets)
        self._runs = {run: self._run(run, members) for run, members in by_run.items()}
        living = {target for members in by_run.values() for target in members}
        self._judged_before = {target: late for target, late in self._judged_before.items() if target in living}
        for run in self._runs.values():
            run.note_waits(phase for target in run.members for phase in _waiting_in(target))
            cuts = {target: cut for target in run.members if (cut := cut_of(target)) is not None}
            if run.see(cuts, self._clock()):
                self._settle(run, cuts)
            elif run.is_new:
                self._judged_before = {
                    target: known for target, known in self._judged_before.items() if target not in run.members
                }
                if not run.calm and len(cuts) == len(run.members):
                    run.calm = _modules(cuts)

    def _run(self, name: str, members: Sequence[Target]) -> Run:
        known = self._runs.get(name)
        return known if known is not None and known.members == tuple(members) else Run(members)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Return the score of a rank, once there is one; see `watch.Watcher`."""
        known = self._judged_before.get(target)
        return () if known is None else (Sample(SCORE, {}, known[0]), Sample(SLOW, {}, float(known[1])))

    def _settle(self, run: Run, cuts: Mapping[Target, Cut]) -> None:
        lateness = run.lateness()
        was = {target: self._is_reported(target) for target in lateness}
        slow = {target for target, known in lateness.items() if known.is_slow or (was[target] and not known.is_well)}
        for target, late in lateness.items():
            if target in slow and not was[target]:
                self._report(run, target, late, cuts, [other for other in run.members if other not in slow])
            elif was[target] and target not in slow:
                message = f"rank {target.claim.rank} is as quick as the others again"
                self._fleet.report(target, OVER, message, step=ranks.step_of(target, cuts[target].steps))
                run.forget()
        self._judged_before |= {target: (late.score, target in slow) for target, late in lateness.items()}
        if not any(late.agreeing >= 0.5 and late.late_s >= LEAST_S for late in lateness.values()):
            run.calm = _modules(cuts)

    @staticmethod
    def _is_reported(target: Target) -> bool:
        """Whether this daemon, or an earlier one, has reported the straggler, and not yet its recovery."""
        return STRAGGLER in target.ongoing

    def _report(
        self, run: Run, target: Target, known: Lateness, cuts: Mapping[Target, Cut], waiting: Sequence[Target]
    ) -> None:
        ratio = f"{known.part_s / known.others_s:.1f} times" if known.others_s > 1e-4 else "more than"
        late_s, module = known.part_s - known.others_s, None
        if known.part == "forward":
            bases = (run.calm, *run.bases)
            module = next(filter(None, (slow_module(base, run.members, target, cuts, late_s) for base in bases)), None)
        fields: dict[str, object] = {
            "step": ranks.step_of(target, cuts[target].steps),
            "part": known.part,
            "seconds": known.part_s,
            "median_seconds": known.others_s,
            "score": known.score,
        }
        where = ""
        if module is not None:
            name, own_s, others_s = module
            fields |= {"module": name, "module_seconds": own_s, "module_median_seconds": others_s}
            snapshot = target.last()
            shown = snapshot.described(name) if snapshot is not None else name
            where = f"; module {shown} takes {duration(own_s)} instead of {duration(others_s)}"
        message = (
            f"rank {target.claim.rank} needs {ratio} the other ranks' time in {known.part}: {duration(known.part_s)} a step "
            f"instead of {duration(known.others_s)}{where}; {ranks.named(waiting)} {'wait' + 's' * (len(waiting) == 1)} for it"
        )
        self._fleet.report(target, STRAGGLER, message, **fields)


def _waiting_in(target: Target) -> Iterator[str]:
    """Yield the phases in which a rank may wait for others."""
    snapshot = target.last()
    if snapshot is not None:
        shares = ranks.counts(ranks.family(snapshot, "hookd_collectives_phase_ratio", ("phase",)))
        yield from (phase for phase, share in shares.items() if share > WAITS and phase in PARTS)


def cut_of(target: Target) -> Cut | None:
    """Return the progress of a rank; None if its phases are not measured, or its page is invalid."""
    if (read := ranks.phase_seconds(target)) is None:
        return None
    steps, phases = read
    return Cut(steps, tuple(phases.get(part, 0.0) for part in PARTS), sum(phases.values()))


def modules_of(target: Target) -> Family | None:
    """Return the modules' forward seconds of a rank."""
    snapshot = target.last()
    return None if snapshot is None else ranks.family(snapshot, "hookd_timing_forward_seconds", ("module",))


def _modules(cuts: Mapping[Target, Cut]) -> _Seconds:
    """Return for each rank its steps, and its modules' forward seconds until then."""
    return {target: (cut.steps, family) for target, cut in cuts.items() if (family := modules_of(target)) is not None}


def slow_module(
    base: _Seconds, members: Sequence[Target], target: Target, cuts: Mapping[Target, Cut], late_s: float
) -> tuple[str, float, float] | None:
    """Find the innermost module that accounts for at least half of a rank's lateness in the forward since `base`.

    Returns:
        Its name, and its seconds per step on this rank and, in the median, on the others.
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
    others = [steps[other] for other in members if other is not target]
    typical = {name: statistics.median(other.get(name, 0.0) for other in others) for name in steps[target]}
    late = [name for name in steps[target] if not is_root(name) and steps[target][name] - typical[name] >= late_s / 2]
    if not late:
        return None
    # The innermost one: the modules that contain it are late, too.
    name = max(late, key=lambda name: (name.count("."), steps[target][name] - typical[name]))
    return name, steps[target][name], typical[name]
