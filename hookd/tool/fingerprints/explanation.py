"""Tell in one sentence what makes a step of one run differ from the same step of another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hookd.tool.fingerprints.alignment import Pair
    from hookd.tool.fingerprints.steps import Entry

SIMPLE = tuple(
    sorted(
        {x for n in range(2, 65) for x in (float(n), 1 / n)}
        | {2.0**n for n in range(7, 25)}
        | {2.0**-n for n in range(7, 25)}
    )
)
"""Ratios that point to a division by a number of micro-batches or ranks, or to a scale."""

SMALL = 1e-5
"""Relative difference of norms below which the two are not both shown."""

LEAST_SCALE, OF_HALF = 128, 0.05
"""The smallest factor that is taken for that of a GradScaler, and the rounding of its logarithm."""

ROUNDING = "A kernel of the backward is not deterministic, or gradients are changed before the step."


class Explanation(NamedTuple):
    """The first difference of a step, and its meaning.

    Attributes:
        sentence: for a person.
        phase, name: where.
        advice: what to do; "" for nothing.
    """

    sentence: str
    phase: str
    name: str = ""
    advice: str = ""


def explain(
    step: int,
    pairs: Sequence[Pair],
    settings: Sequence[str],
    is_same: Callable[[Pair], bool],
    *,
    first: bool,
    adjacent: bool,
    is_exact: bool = True,
) -> Explanation:
    """Explain a step that differs.

    Args:
        step: its number.
        pairs: what both runs have.
        settings: the optimizers' settings that differ, in words.
        is_same: whether a pair counts as equal.
        first: whether it is the first that both have.
        adjacent: whether the step before it is equal and known.
        is_exact: whether only equal bits count as equal.
    """
    differing = [pair for pair in pairs if not is_same(pair)]
    return _Step(step, pairs, differing, first=first, adjacent=adjacent, is_exact=is_exact).explained(settings)


class _Step:
    """One step, with the pairs that it has and those that differ, in the order in which A has them."""

    def __init__(
        self, number: int, pairs: Sequence[Pair], differing: Sequence[Pair], *, first: bool, adjacent: bool, is_exact: bool
    ) -> None:  # fmt: skip
        self._number, self._first, self._adjacent, self._is_exact = number, first, adjacent, is_exact
        self._at = f"Step {number}"
        self._pairs, self._differing = _by_phase(pairs), _by_phase(differing)
        self._order = [pair for pair in differing if pair.spot[0] != "random"]

    def explained(self, settings: Sequence[str]) -> Explanation:
        """Explain the first difference."""
        if weights := [pair for pair in self._order if pair.spot[0] == "weights"]:
            return self._weights(weights)
        first = self._order[0] if self._order else None
        if first is None and not settings and (generators := self._generators()):  # nothing else is compared
            return Explanation(f"{self._at}: the random state of {generators} differs.", "random",
                               advice="Set the same seed, or restore the random state.")  # fmt: skip
        if first is None or first.spot[0] in ("state", "update", "buffers"):
            return self._optimized(settings)
        if first.spot[0] == "gradients":
            if (calls := next((pair for pair in self._order if _is_call(pair)), None)) is not None:
                return self._calls(calls)
            return self._gradients(
                [pair for pair in self._order if pair.spot[0] == "gradients" and pair.spot[2] == first.spot[2]]
            )
        if _is_call(first):
            return self._calls(first)
        of = {"data": self._data, "forward": self._forward, "loss": self._loss, "backward": self._backward}
        return of[first.spot[0]](first)

    def _calls(self, pair: Pair) -> Explanation:
        """Explain that one run makes more calls than the other."""
        phase, name = pair.spot[:2]
        counts = [
            len({one.spot[2] for one in self._pairs[phase] if one.spot[1] == name and entry(one) is not None})
            for entry in (_of_a, _of_b)
        ]
        what = (
            f"calls {name}"
            if phase in ("data", "forward")
            else "begins a backward"
            if phase == "loss"
            else f"comes back to {name}"
        )
        if counts[0] == counts[1]:
            return Explanation(
                f"{self._at}: the calls of {name} have other numbers of inputs or outputs in A and in B.", phase, name
            )
        equal = self._where_all_is_equal("")
        sentence = f"{equal}A {what} {_times(counts[0])} in this step, B {_times(counts[1])}."
        advice = "Look at the number of micro-batches, and at steps that one run skips or repeats."
        if 0 in counts:
            advice = "Calls that no backward follows are not recorded: in one run the model may be in eval(), under no_grad(), or the step was skipped."
        return Explanation(sentence, phase, name, advice)

    # -- with what it begins

    def _weights(self, weights: list[Pair]) -> Explanation:
        name = weights[0].spot[1]
        among = f"{len(weights)} of {len(self._pairs['weights'])} parameters differ, the first is {name}"
        if weights[0].a and weights[0].b and weights[0].kinds[0] != weights[0].kinds[1]:
            sentence = f"{self._at}: {name} is {' against '.join(weights[0].kinds)}; {len(weights)} of {len(self._pairs['weights'])} parameters differ."
            return Explanation(
                sentence, "weights", name, "Compare runs of other dtypes with a --tolerance, such as 4ulp:bfloat16."
            )
        if self._first and "data" in self._differing:
            sentence = f"{self._at}, the first that both have: the batches and the weights differ, so the runs parted before. {among}."
            return Explanation(
                sentence, "weights", name, "Record both from the beginning, with `hookd run --fingerprint`."
            )
        if self._first:
            sentence = f"{self._at}, the first: the runs begin with other weights. {among}."
            return Explanation(
                sentence, "weights", name, "Compare from the checkpoint or the seed of the initialization on."
            )
        if self._adjacent:
            advice = "Look for code that writes parameters between the steps: loading, clipping, averaging."
            return Explanation(
                f"{self._at}: the weights differ before it, and did not after the step before. {among}.",
                "weights",
                name,
                advice,
            )
        return Explanation(f"{self._at}: the weights differ before it. {among}.", "weights", name,
                           "Record every step: the runs part between two recorded steps.")  # fmt: skip

    def _data(self, pair: Pair) -> Explanation:
        kinds = self._generators()
        if pair.kinds[0] != pair.kinds[1]:
            what = f"the batches differ in type or shape, {pair.kinds[0]} against {pair.kinds[1]}"
        else:
            what = "the batches differ"
        more = f" So does the random state of {kinds}." if kinds else ""
        advice = (
            "Look at the seed of the data's order."
            if kinds
            else "Look at the order and the contents of the data, and at the sampler's position after a resume."
        )
        return Explanation(f"{self._at}: {what}; the model had no part in it.{more}", "data", pair.spot[1], advice)

    def _generators(self) -> str:
        return ", ".join(pair.spot[3] for pair in self._differing.get("random", ()))

    def _same(self) -> str:
        """Return in words what is equal, of that with which the step begins."""
        same = ["same batch"] * any(pair.a and pair.b for pair in self._pairs.get("data", ()))
        if weights := self._pairs.get("weights"):
            same.append(
                "same weights" if all(pair.a and pair.b for pair in weights) else "same weights where both have them"
            )
        same += ["another random state" if self._draws_otherwise() else "same random state"] * ("random" in self._pairs)
        return ", ".join(same)

    def _where_all_is_equal(self, more: str) -> str:
        """Return the beginning of a sentence: the step, and what is equal."""
        equal = ", ".join(filter(None, (self._same(), more)))
        return f"{self._at}: {equal}; " if equal else f"{self._at}: "

    def _has(self, *phases: str) -> bool:
        return all(phase in self._pairs for phase in phases)

    def _draws_otherwise(self) -> bool:
        """Whether a generator of torch differs; modules draw from no other."""
        return any(pair.spot[3].startswith(("torch", "cuda:")) for pair in self._differing.get("random", ()))

    # -- what the model computes

    def _forward(self, pair: Pair) -> Explanation:
        _, name, call, slot = pair.spot
        which = name if not call else f"call {call + 1} of {name}"
        how = _difference(pair)
        if slot.startswith("input"):
            sentence = f"{self._at}: {self._same()}; the input of {which} differs {how}, and all that modules returned before is equal."
            return Explanation(
                sentence, "forward", name, "Look at the code that calls it: something between the modules differs."
            )
        if pair.kinds[0] != pair.kinds[1]:
            advice = f"{name} computes in another type or shape."
        elif self._draws_otherwise():
            advice = f"{name} draws random numbers. Set the same seed, or restore the random state."
        else:
            advice = f"{name} has other settings, code that writes its parameters through .data, or a kernel that is not deterministic."
        sentence = f"{self._at}: {self._same()}; {which} is the first module whose output differs {how}. Everything before it {'has the same bits' if self._is_exact else 'is equal'}."
        return Explanation(sentence, "forward", name, advice)

    def _loss(self, pair: Pair) -> Explanation:
        sentence = f"{self._at}: {self._same()}, equal outputs of all modules; the loss differs {_difference(pair)}."
        advice = "Look at the targets, which are recorded only if the model gets them, at the loss function, and at what it is divided by."
        if _is_scaled(pair):
            advice = "A GradScaler multiplies the loss by such a number: `--what forward,gradients,update` compares what does not depend on it. So does a loss that is a sum instead of a mean."
        return Explanation(sentence, "loss", "", advice)

    def _backward(self, pair: Pair) -> Explanation:
        name, equal = pair.spot[1], self._where_all_is_equal("forward and loss equal")
        if pair.spot[3].startswith("grad of output"):
            sentence = f"{equal}the gradient that reaches the output of {name} differs {_difference(pair)}, and all before it in the backward are equal."
            advice = f"Look at what comes after {name} in the forward: a function between the modules, or the loss."
        else:
            sentence = f"{equal}{name} gets an equal gradient and passes on another one {_difference(pair)}."
            advice = f"The backward of {name} has a kernel that is not deterministic, or other settings."
        return Explanation(sentence, "backward", name, advice)

    def _gradients(self, gradients: list[Pair]) -> Explanation:
        lacking = [pair for pair in gradients if pair.a is None or pair.b is None]
        equal = self._where_all_is_equal("forward and loss equal" if self._has("forward", "loss") else "")
        if lacking:
            name, run = lacking[0].spot[1], "A" if lacking[0].a is None else "B"
            others = [pair.spot[1] for pair in lacking[1:]]
            more = f", nor does {others[0]}" if len(others) == 1 else f", nor do {len(others)} others" if others else ""
            return Explanation(f"{equal}{name} gets no gradient in {run}{more}.", "gradients", name,
                               "It is frozen or detached there.")  # fmt: skip
        ratios = [pair.b.norm / pair.a.norm for pair in gradients if pair.a and pair.b and pair.a.norm]
        is_all = len(gradients) == len(self._pairs["gradients"])
        if is_all and ratios and max(ratios) - min(ratios) <= 1e-3 * max(ratios) and abs(ratios[0] - 1) > 1e-3:  # noqa: PLR2004
            sentence = f"{equal}all gradients of B are {ratios[0]:.4g} times those of A when the optimizer uses them."
            return Explanation(
                sentence,
                "gradients",
                "",
                "Look at clipping, at a GradScaler, and at averages over micro-batches or ranks.",
            )
        pair = gradients[-1]  # the backward comes to the last parameter first
        name = pair.spot[1]
        sentence = f"{equal}the gradient of {name} differs {_difference(pair)}, {len(gradients)} of {len(self._pairs['gradients'])} do."
        return Explanation(
            sentence,
            "gradients",
            name,
            ROUNDING
            if _relative(pair) < SMALL and not (pair.a and pair.b and _ends(pair.a, pair.b))
            else "Look at zero_grad(), at accumulation and clipping, and at the all-reduce of ranks.",
        )

    # -- what the optimizer does

    def _optimized(self, settings: Sequence[str]) -> Explanation:
        """Explain a difference in the optimizer's settings, its state, or its results."""
        same = "forward and gradients equal" if self._has("forward", "gradients") else "equal before the update"
        equal = f"{self._at}: {same}"
        if settings:
            is_new = any(one.startswith("steps done") for one in settings)
            advice = (
                "The optimizer was made anew, or its state was not restored."
                if is_new
                else "Look at the optimizer's arguments, and at schedulers."
            )
            sentence = f"Equal until the optimizer's update in step {self._number}: {', '.join(settings)}."
            return Explanation(sentence, "settings", settings[0].rpartition(" against")[0].rpartition(" ")[0], advice)
        if state := self._differing.get("state"):
            name, slot = state[0].spot[1], state[0].spot[3]
            sentence = f"{equal}; the optimizer's {slot} of {name} differs {_difference(state[0])}, {len(state)} of {len(self._pairs['state'])} tensors of its state do."
            return Explanation(sentence, "state", name, "Was the optimizer's state restored in both?")
        if update := self._differing.get("update"):
            name = update[0].spot[1]
            sentence = f"{equal}, and so are the optimizer's settings; {name} differs after the step {_difference(update[0])}, {len(update)} of {len(self._pairs['update'])} parameters do."
            return Explanation(
                sentence, "update", name, "The optimizer has another state, or another implementation (foreach, fused)."
            )
        pair = next(iter(self._differing.get("buffers", ())), None)
        if pair is not None:
            sentence = f"{equal}, and so are the parameters after the step; the buffer {pair.spot[1]} differs {_difference(pair)}."
            return Explanation(sentence, "buffers", pair.spot[1])
        return Explanation(f"{self._at}: something differs that only one of the runs has.", "")


def _difference(pair: Pair) -> str:
    """Return in words, in brackets, by how much a pair differs."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        return "(only one has it)"
    if pair.kinds[0] != pair.kinds[1]:
        return f"({pair.kinds[0]} against {pair.kinds[1]}, {_in_numbers(a, b)})"
    return f"({_in_numbers(a, b)})"


def _in_numbers(a: Entry, b: Entry) -> str:
    if a.bad != b.bad:
        return f"{a.bad} {'element is' if a.bad == 1 else 'elements are'} NaN or infinite against {b.bad}"
    if not (a.norm or b.norm):
        return "in some bits"
    if a.norm == b.norm:
        return f"both have the norm {a.norm:.9g}{_ends(a, b)}"
    ratio = b.norm / a.norm if a.norm else math.inf
    simple = next((one for one in SIMPLE if math.isclose(ratio, one, rel_tol=1e-3)), None)
    relative = _relative_norm(a, b)
    if relative < SMALL:
        return f"its norm, {a.norm:.4g}, by {relative:.1e} of it{_ends(a, b)}"
    return f"norm {a.norm:.6g} against {b.norm:.6g}, {f'{simple:.6g} times' if simple is not None else f'{relative:.1e} of it'}"


def _ends(a: Entry, b: Entry) -> str:
    """Return in words how the least or the greatest element differs where the norm does not show it; "" if they do not."""
    size = max(abs(one) for one in (a.least, a.greatest, b.least, b.greatest))
    ends = (("least", a.least, b.least), ("greatest", a.greatest, b.greatest))
    name, one, other = max(ends, key=lambda end: abs(end[1] - end[2]))
    return f", the {name} element {one:.6g} against {other:.6g}" if abs(one - other) > SMALL * size else ""


def _is_scaled(pair: Pair) -> bool:
    """Whether one is the other times a power of two from LEAST_SCALE on, but for the rounding of half precision."""
    norms = sorted(one.norm for one in (pair.a, pair.b) if one is not None)
    if len(norms) < 2 or not norms[0] or norms[1] < norms[0] * LEAST_SCALE / 2:  # noqa: PLR2004
        return False
    exponent = math.log2(norms[1] / norms[0])
    return round(exponent) >= math.log2(LEAST_SCALE) and abs(exponent - round(exponent)) < OF_HALF


def _relative(pair: Pair) -> float:
    """Return the relative difference of the norms of a pair; infinite if one lacks it or has other elements that are not finite."""
    a, b = pair.a, pair.b
    return math.inf if a is None or b is None or a.bad != b.bad else _relative_norm(a, b)


def _relative_norm(a: Entry, b: Entry) -> float:
    most = max(a.norm, b.norm)
    return abs(a.norm - b.norm) / most if most else 0.0


def _by_phase(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(pair.spot[0], []).append(pair)
    return found


def _is_call(pair: Pair) -> bool:
    """Whether only one of the runs makes a call."""
    return (pair.a is None) != (pair.b is None) and pair.spot[0] in ("data", "forward", "loss", "backward")


def _of_a(pair: Pair) -> Entry | None:
    return pair.a


def _of_b(pair: Pair) -> Entry | None:
    return pair.b


def _times(count: int) -> str:
    return {0: "not once", 1: "once"}.get(count, f"{count} times")
