"""Compare two fingerprints: where do the runs part, and why?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hookd.tool.fingerprints import alignment
from hookd.tool.fingerprints.explanation import explain
from hookd.tool.fingerprints.steps import COMPARED, PHASES, REPLICATED
from hookd.tool.fingerprints.tolerance import Tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.fingerprints.alignment import Pair
    from hookd.tool.fingerprints.file import Fingerprint
    from hookd.tool.fingerprints.steps import Entry, Step

EQUAL, DIFFERENT, INCOMPARABLE = 0, 1, 2
"""Exit codes of `hookd diff`."""
NO_COMMON_STEP = "The files have no step in common"
"""How the sentence begins of files that have none."""
CALLS = ("data", "forward", "loss", "backward")
"""Phases of which each call counts."""
ROUNDING = 1e-5
"""Relative difference of norms that a device and a processor compute of equal elements, which they add up in another order."""
ABOUT_REPLICAS = "They are ranks of one job with batches of their own: what depends on the batch was not compared."
LOOKED_AT = 20
"""Equal steps before the first difference in which a generator that differs shows that nothing depends on it."""


@dataclass(frozen=True)
class Growth:
    """How different a step is.

    Attributes:
        step: its number in A.
        differing, pairs: number of things that differ, of so many that both have.
        relative: the largest relative difference of norms among them.
    """

    step: int
    differing: int
    pairs: int
    relative: float


@dataclass
class Comparison:
    """The result.

    Attributes:
        code: one of EQUAL, DIFFERENT, INCOMPARABLE.
        sentence: the result in one sentence.
        step: the first step that differs; 0 if none does.
        phase, name: where it differs first; "" if unknown.
        advice: what to do; "" for nothing.
        notes: what was assumed, and what could not be compared.
        compared: number of steps that both have.
        growth: the steps whose entries both have, from the first different one on.
    """

    code: int
    sentence: str
    step: int = 0
    phase: str = ""
    name: str = ""
    advice: str = ""
    notes: list[str] = field(default_factory=list)
    compared: int = 0
    growth: list[Growth] = field(default_factory=list)


@dataclass(frozen=True)
class Terms:
    """The terms of a comparison.

    Attributes:
        tolerance: how different tensors may be that count as equal.
        names: how B calls modules of A.
        phases: what is compared, of `steps.COMPARED`; None: all, but of two ranks with batches of their own what replicas have in common.
    """

    tolerance: Tolerance = field(default_factory=Tolerance)
    names: Mapping[str, str] = field(default_factory=dict)
    phases: frozenset[str] | None = None


def compare(a: Fingerprint, b: Fingerprint, terms: Terms = Terms()) -> Comparison:  # noqa: B008  it is constant
    """Compare two fingerprints step by step."""
    if empty := [run for run, one in (("A", a), ("B", b)) if not one.steps]:
        return Comparison(INCOMPARABLE, f"No step was recorded in {' and '.join(empty)}.",
                          advice="Look at what `hookd` said while it recorded.")  # fmt: skip
    later, why = alignment.offset(a, b)
    if later is None:
        return Comparison(INCOMPARABLE, f"It is unknown which steps of the files are the same: {why}.",
                          advice="Record both from the beginning, with `hookd run --fingerprint`.")  # fmt: skip
    common = [step for step in a.steps if step + later in b.steps]
    if not common:
        return Comparison(INCOMPARABLE, f"{NO_COMMON_STEP}: {_range(a)} and {_range(b)}.",
                          notes=[why] if later else [],
                          advice=_apart(a, b, later) or "Record the same steps, with the same --every.")  # fmt: skip
    notes = [why] if later else []
    if terms.phases is None:
        are_replicas = _are_replicas(a, b, later, common)
        terms = replace(terms, phases=REPLICATED if are_replicas else frozenset(COMPARED))
        notes += [ABOUT_REPLICAS] * are_replicas
    notes += _without_module(a, terms.names)
    comparer = _Comparer(a, b, later, terms)
    notes += comparer.guess(common)
    if ABOUT_REPLICAS in notes and (name := comparer.other_part(common)):
        return Comparison(INCOMPARABLE, f"The ranks hold other parts of the model: {name}.", notes=notes,
                          advice="Compare the same rank of two runs.")  # fmt: skip
    known = comparer.comparable(common)
    if not known or not comparer.has_pairs(known):
        what = ", ".join(phase for phase in PHASES if phase in (terms.phases or ()))
        return Comparison(INCOMPARABLE, f"The files have no tensors in common of what is compared: {what}.", notes=notes,
                          advice="Record it in both, with `hookd fingerprint --what`, or compare other parts.")  # fmt: skip
    if dropped := len(common) - len(known):
        what = "1 step only the digest was" if dropped == 1 else f"{dropped} steps only digests were"
        notes.append(f"Of {what} kept, of more than is compared: left out.")
    common, different = known, [step for step in known if not comparer.is_equal(step)]
    if not different:
        what = "" if not terms.tolerance else f" within a tolerance of {terms.tolerance}"
        steps = f"{len(common)} step" + ("s" if len(common) > 1 else "")
        if generators := comparer.generators(common):
            notes.append(
                f"The random state of {', '.join(sorted(generators))} differs; nothing that was {comparer.what} depends on it."
            )
        notes += _outside(a, b, later)
        return Comparison(EQUAL, f"Equal in {steps}{what}.", notes=notes, compared=len(common))
    return _parted(comparer, common, different, notes)


def _without_module(a: Fingerprint, names: Mapping[str, str]) -> list[str]:
    """Return a note on each name that is to be replaced in A and that nothing in it has."""
    steps = [step for step in a.steps.values() if step is not None]
    known = {alignment.plain(key.name) for step in steps[:LOOKED_AT] for key in step.entries}
    return [
        f"A has no module {old}, which B would call {new}."
        for old, new in names.items()
        if known and not any(name == old or name.startswith(f"{old}.") for name in known)
    ]


def _are_replicas(a: Fingerprint, b: Fingerprint, later: int, common: Sequence[int]) -> bool:
    """Whether two fingerprints are of ranks of one job that have batches of their own."""
    both = ((a.steps[step], b.steps[step + later]) for step in common)
    one, other = next(((one, other) for one, other in both if one is not None and other is not None), (None, None))
    return (
        one is not None and other is not None and alignment.are_ranks(a, b) and alignment.have_other_batches(one, other)
    )


def _parted(comparer: _Comparer, common: list[int], different: list[int], notes: list[str]) -> Comparison:
    first = different[0]
    known = next((step for step in different if comparer.is_whole(step)), None)
    growth = [comparer.growth(step) for step in common if step >= first and comparer.is_whole(step)]
    if known is None:
        sentence = (
            f"Step {first} differs; the entries of that and of all later steps were dropped to keep a file small."
        )
        return Comparison(DIFFERENT, sentence, first, notes=notes, compared=len(common),
                          advice="Record again, with a larger --max-size, or fewer --modules.")  # fmt: skip
    if known != first:
        notes = [
            *notes,
            f"The first step that differs is {first}; step {known} is the first of them with entries in both files.",
        ]
    at = common.index(known)
    before = common[at - 1] if at else None
    unused = comparer.generators(common[max(0, at - LOOKED_AT) : at])  # the steps in which they differed were equal
    pairs = [pair for pair in comparer.pairs(known) if pair.spot[0] != "random" or pair.spot[3] not in unused]
    settings = comparer.settings(known)
    tolerance = comparer.tolerance
    found = explain(known, pairs, settings, comparer.is_same,
                    first=not at, adjacent=before == known - 1, is_exact=not tolerance)  # fmt: skip
    if tolerance:
        advice = tolerance.advice(pair.dtypes for pair in pairs if pair.a and pair.b)
        notes = [*notes, f'"Same" and "equal" mean within a tolerance of {tolerance}.', *filter(None, [advice])]
    if settings and found.phase != "settings":
        notes = [*notes, f"The settings of the optimizers differ in this step, too: {', '.join(settings)}."]
    return Comparison(
        DIFFERENT, found.sentence, first, found.phase, found.name, found.advice, notes, len(common), growth
    )


class _Comparer:
    """Compares the steps of two fingerprints."""

    def __init__(self, a: Fingerprint, b: Fingerprint, later: int, terms: Terms) -> None:
        self._a, self._b, self._later = a, b, later
        self.tolerance, self._names = terms.tolerance, dict(terms.names)
        self._phases = frozenset(COMPARED) if terms.phases is None else terms.phases
        self._equal: dict[int, bool] = {}  # whether a step is, as far as that was asked
        self._only: set[tuple[str, str]] = set()  # phases and names that only one of the runs ever has
        self._unused: set[str] = set()  # generators that nothing draws from
        self._is_random_alone = self._phases == {"random"}
        self.what = "computed" if self._phases >= frozenset(COMPARED) else "compared"

    def guess(self, common: list[int]) -> list[str]:
        """Find modules that B calls otherwise, from the first step with entries; return notes on them."""
        step = next((step for step in common if self.is_whole(step)), None)
        if step is None:
            return []
        one, other = self._steps(step)
        names = {} if alignment.are_ranks(self._a, self._b) else alignment.guess(one, other)
        self._names.update(names)
        steps = [step for step in common if self.is_whole(step)][:LOOKED_AT]
        ours, theirs = (set[tuple[str, str]]() for _ in range(2))
        for step in steps:
            for known, found in zip((ours, theirs), self._steps(step), strict=True):
                known.update((key.phase, key.name) for key in found.entries)
        self._only = ours ^ theirs
        self._unused = self._constant(steps)
        notes = [f"{old} of A is taken for {new} of B." for old, new in _shortest(names).items()]
        for run, mine, others in (("A", ours, theirs), ("B", theirs, ours)):
            for phase, words in (("forward", "calls"), ("weights", "has the parameters")):
                lost = sorted(name for of, name in mine - others if of == phase)
                notes += (
                    [f"Only {run} {words} {_listed(lost)}."] if lost and any(of == phase for of, _ in others) else []
                )
        whole = [
            one
            for step in common
            if self.is_whole(step)
            for one in (self._a.steps[step], self._b.steps[step + self._later])
        ]
        if unread := max(one.unread for one in whole if one is not None):
            what = "tensor of a step was" if unread == 1 else "tensors of a step were"
            notes.append(f"{unread} {what} not read, and not compared: sparse, or lost on a device.")
        return notes + self._mixed(steps)

    def _mixed(self, steps: Sequence[int]) -> list[str]:
        """Return a note on tensors of which the runs have digests of two algorithms."""
        most = max((sum(pair.is_mixed for pair in self.pairs(step)) for step in steps), default=0)
        what = "1 tensor" if most == 1 else f"{most} tensors"
        how = "the norm, the least and the greatest element were compared, and nothing of integers"
        note = f"Only one run computed {what} of a step on a device, so that the digests are of two kinds: {how}."
        return [note] if most else []

    def _constant(self, steps: Sequence[int]) -> set[str]:
        """Return the generators whose state is the same in all of these steps of each run: nothing draws from them."""
        states: dict[str, tuple[set[int], set[int]]] = {}
        for step in steps:
            for at, found in enumerate(self._steps(step)):
                for key, entry in found.entries.items():
                    if key.phase == "random":
                        states.setdefault(key.slot, (set(), set()))[at].add(entry.bits)
        is_known = len(steps) > 1
        return {slot for slot, seen in states.items() if slot != "torch" and not (is_known and max(map(len, seen)) > 1)}

    def comparable(self, common: Sequence[int]) -> list[int]:
        """Return the steps that can be compared.

        The digest of a step is of all of it. It does not tell a difference where less is compared, nor where a step that is whole is
        equal and yet has another digest: a random state that nothing depends on, a renamed module.
        """
        is_exact = not self.tolerance and self._phases >= frozenset(COMPARED)
        if is_exact and all(
            self._has_one_digest(step) or not self.is_equal(step) for step in common if self.is_whole(step)
        ):
            return list(common)
        return [step for step in common if self.is_whole(step) or self._has_one_digest(step)]

    def _has_one_digest(self, step: int) -> bool:
        return self._a.digests[step] == self._b.digests[step + self._later]

    def has_pairs(self, steps: Iterable[int]) -> bool:
        """Whether both runs have a tensor of what is compared; True if no step is whole, and if only settings are compared."""
        whole = [step for step in steps if self.is_whole(step)]
        pairs = (pair for step in whole for pair in self.pairs(step))
        return not whole or self._phases <= {"settings"} or any(pair.a and pair.b for pair in pairs)

    def other_part(self, common: Sequence[int]) -> str:
        """Return in words the first parameter that has another shape in B, as on ranks of a pipeline; "" without one."""
        step = next((step for step in common if self.is_whole(step)), None)
        pairs = [] if step is None else self.pairs(step)
        return next(
            (
                f"{pair.spot[1]} is {' against '.join(pair.kinds)}"
                for pair in pairs
                if pair.spot[0] in ("weights", "update") and pair.a and pair.b and pair.kinds[0] != pair.kinds[1]
            ),
            "",
        )

    def is_whole(self, step: int) -> bool:
        """Whether both files have the entries of a step."""
        return self._a.steps[step] is not None and self._b.steps[step + self._later] is not None

    def _steps(self, step: int) -> tuple[Step, Step]:
        return self._step(self._a, step, self._names), self._step(self._b, step + self._later, {})

    @staticmethod
    def _step(of: Fingerprint, step: int, names: Mapping[str, str]) -> Step:
        """Return a step with all weights before it: those that were not written since are in the step before."""
        found, before = of.steps[step], of.steps.get(step - 1)
        assert found is not None  # see `is_whole`
        updates = before.entries.items() if before is not None else ()
        weights = {key._replace(phase="weights"): entry for key, entry in updates if key.phase == "update"}
        return alignment.renamed(replace(found, entries={**weights, **found.entries}), names)

    def pairs(self, step: int) -> list[Pair]:
        """Return what a step of A and that of B have, of the phases that are compared."""
        found = alignment.pairs(*self._steps(step))
        return [
            pair
            for pair in found
            if pair.spot[0] in self._phases
            and (self._is_random_alone or pair.spot[0] != "random" or pair.spot[3] not in self._unused)
        ]

    def settings(self, step: int) -> list[str]:
        """Return the settings of the optimizers that differ, in words."""
        if "settings" not in self._phases:
            return []
        one, other = self._steps(step)
        if len(one.settings) != len(other.settings):
            return [f"{len(one.settings)} groups of parameters against {len(other.settings)}"]
        return [
            f"{name} {ours.get(name, 'unset')} against {theirs.get(name, 'unset')}"
            for ours, theirs in zip(one.settings, other.settings, strict=True)
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]

    def is_equal(self, step: int) -> bool:
        """Whether all that is compared of a step is equal."""
        if step not in self._equal:
            self._equal[step] = self._has_one_digest(step) or (self.is_whole(step) and self._has_equal_entries(step))
        return self._equal[step]

    def _has_equal_entries(self, step: int) -> bool:
        pairs = [pair for pair in self.pairs(step) if self._is_random_alone or pair.spot[0] != "random"]
        return not self.settings(step) and all(map(self.is_same, pairs))

    def generators(self, steps: Iterable[int]) -> set[str]:
        """Return the random number generators that differ in any of these steps."""
        return {
            pair.spot[3]
            for step in steps
            if self.is_whole(step) and not self._has_one_digest(step)
            for pair in self.pairs(step)
            if pair.spot[0] == "random" and not self.is_same(pair)
        }

    def is_same(self, pair: Pair) -> bool:
        """Whether a pair is equal, or is of something that only one of the runs has at all, such as a module that was inserted."""
        one, other = pair.a, pair.b
        if one is None or other is None:
            phase, name = pair.spot[:2]
            if phase == "gradients":  # of a parameter that both have
                return ("weights", name) in self._only
            return phase not in CALLS or (phase, name) in self._only
        is_one_kind = pair.kinds[0] == pair.kinds[1]
        if pair.shapes[0] != pair.shapes[1] or not (self.tolerance or is_one_kind):
            return False
        most = self.tolerance.of(*pair.dtypes)
        if pair.is_mixed:
            return one.bad == other.bad and _is_near(one, other, most)
        if one.bits == other.bits and is_one_kind:  # equal bits of two dtypes are two numbers
            return True
        return bool(most) and one.bad == other.bad and _relative(one, other) <= most

    def growth(self, step: int) -> Growth:
        """Return how different a step is."""
        both = [pair for pair in self.pairs(step) if pair.a is not None and pair.b is not None]
        differing = [pair for pair in both if not self.is_same(pair)]
        most = max((_relative(pair.a, pair.b) for pair in differing if pair.a and pair.b), default=0.0)
        return Growth(step, len(differing), len(both), most)


def _is_near(a: Entry, b: Entry, most: float) -> bool:
    """Whether the numbers of two entries are equal, but for the rounding of their norms and a relative difference."""
    ends = (a.least, a.greatest) == (b.least, b.greatest)
    return _relative(a, b) <= max(most, ROUNDING if ends else 0.0)


def _relative(a: Entry, b: Entry) -> float:
    """Return the largest relative difference of norm, least and greatest element; the ends relative to the largest magnitude."""
    size = max(abs(a.least), abs(a.greatest), abs(b.least), abs(b.greatest))
    of_ends = max(abs(a.least - b.least), abs(a.greatest - b.greatest)) / size if size else 0.0
    norm = max(a.norm, b.norm)
    return max(abs(a.norm - b.norm) / norm if norm else 0.0, of_ends)


def _shortest(names: Mapping[str, str]) -> dict[str, str]:
    """Return the renamed modules without those below them that are renamed in the same way."""
    found: dict[str, str] = {}
    for old, new in sorted(names.items(), key=lambda item: len(item[0])):
        if not any(old.startswith(f"{above}.") and new == found[above] + old[len(above) :] for above in found):
            found[old] = new
    return found


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _apart(a: Fingerprint, b: Fingerprint, later: int) -> str:
    """Return what to do if one of the files ends before the other one begins; "" otherwise."""
    for run, one, other, distance in (("A", a, b, later), ("B", b, a, -later)):
        if one.steps and other.steps and (missing := min(other.steps) - distance - max(one.steps)) > 0:
            when = "1 step" if missing == 1 else f"{missing} steps"
            return f"Record more steps: {run} comes to the first step of the other file {when} later."
    return ""


def _outside(a: Fingerprint, b: Fingerprint, later: int) -> list[str]:
    """Return notes on the steps that one of the files has before and after those of the other."""
    found = []
    for run, one, other, distance in (("A", a, b, later), ("B", b, a, -later)):
        first, last = min(other.steps) - distance, max(other.steps) - distance
        before, after = ([step for step in one.steps if is_outside(step)] for is_outside in (first.__gt__, last.__lt__))
        ranges = [
            f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}" for steps in (before, after) if steps
        ]
        what = "step" if len(before) + len(after) == 1 else "steps"
        found += [f"Not compared: {what} {' and '.join(ranges)}, which only {run} has."] if ranges else []
    return found


def _range(one: Fingerprint) -> str:
    steps = list(one.steps)
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
