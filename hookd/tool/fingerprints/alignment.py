"""Match the steps and the names of two fingerprints."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hookd.tool.fingerprints.file import Fingerprint
    from hookd.tool.fingerprints.steps import Entry, Key, Step

Spot = tuple[str, str, int, str]
"""What was read, without its type: phase, name, number of the call, slot."""
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Names that DistributedDataParallel, torch.compile, FSDP and checkpoint_wrapper put before those of a model."""
_LOOKED_AT = 50
"""Steps of each file by which the distance of their numbers is found."""


class Pair(NamedTuple):
    """The entries of both runs at one spot; None where one lacks it."""

    spot: Spot
    a: Entry | None
    b: Entry | None
    kinds: tuple[str, str]
    """Dtype and shape of both, in words."""
    algorithms: tuple[str, str]
    """Those of both digests; "" where one lacks it."""

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes of both; "" of what is not a tensor, or where one lacks it."""
        return self.kinds[0].partition(" ")[0], self.kinds[1].partition(" ")[0]

    @property
    def shapes(self) -> tuple[str, str]:
        """The shapes of both, in words."""
        return self.kinds[0].partition(" ")[2], self.kinds[1].partition(" ")[2]

    @property
    def is_mixed(self) -> bool:
        """Whether both have a digest, of two algorithms, so that the digests say nothing."""
        return all(self.algorithms) and self.algorithms[0] != self.algorithms[1]


def offset(a: Fingerprint, b: Fingerprint) -> tuple[int | None, str]:
    """Return by how much the numbers of B's steps are larger than those of the same steps of A, or None if unknown, and why, in words.

    Ranks of one job are matched by the marks of their steps. A run that begins with the weights that the other has after some
    step, as after a resume, goes on there. Otherwise numbers that count from the beginning of the training are trusted, and others
    are matched by steps that have the same batch.
    """
    firsts = [next((step for step in one.steps.values() if step is not None), None) for one in (a, b)]
    if firsts[0] is None or firsts[1] is None:
        return 0, ""
    if (later := _by_mark(a, b)) is not None:
        return later, f"Step N of A is step N{later:+} of B: they are ranks of one job." if later else ""
    are_absolute = firsts[0].is_absolute and firsts[1].is_absolute
    if _weights(firsts[0], "weights") == _weights(firsts[1], "weights") != {}:
        later = 0 if are_absolute else firsts[1].number - firsts[0].number
        return later, f"Step N of A is step N{later:+} of B: they begin with the same weights." if later else ""
    if (step := _followed(a, firsts[1])) is not None:
        return firsts[1].number - step - 1, f"B begins with the weights that A has after step {step}."
    if (step := _followed(b, firsts[0])) is not None:
        return step + 1 - firsts[0].number, f"A begins with the weights that B has after step {step}."
    if are_absolute:
        return 0, ""
    known = {_batch(step): step.number for step in _whole(a)}
    found = Counter(step.number - known[batch] for step in _whole(b) if (batch := _batch(step)) in known)
    if known and not found and any(_whole(b)) and not are_ranks(a, b):
        return None, "they count from the attach, and no two have the same batch or begin with the same weights"
    later = 0 if not found or 0 in found else found.most_common(1)[0][0]
    return later, f"Step N of A is step N{later:+} of B: they have the same batches." if later else ""


def are_ranks(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether two fingerprints are of two ranks of one job."""
    return a.about["run"] == b.about["run"] and a.about.get("rank") != b.about.get("rank")


def _by_mark(a: Fingerprint, b: Fingerprint) -> int | None:
    """Return the distance of the step numbers of two ranks of one job; None of other runs."""
    if not are_ranks(a, b):
        return None
    marks = {step.mark: step.number for step in a.steps.values() if step is not None and step.mark}
    steps = (step for step in b.steps.values() if step is not None and step.mark in marks)
    return next((step.number - marks[step.mark] for step in steps), None)


def _followed(one: Fingerprint, first: Step) -> int | None:
    """Return the step of a run after which it has the weights with which another one begins."""
    weights = _weights(first, "weights")
    steps = (step for step in one.steps.values() if step is not None and weights)
    return next((step.number for step in steps if _weights(step, "update") == weights), None)


def have_other_batches(a: Step, b: Step) -> bool:
    """Whether the models of two steps are called with other data."""
    return bool(_batch(a) and _batch(b)) and _batch(a) != _batch(b)


def _weights(step: Step, phase: str) -> dict[str, int]:
    return {key.name: entry.bits for key, entry in step.entries.items() if key.phase == phase}


def _whole(one: Fingerprint) -> Iterator[Step]:
    yield from [step for step in one.steps.values() if step is not None and _batch(step)][:_LOOKED_AT]


def _batch(step: Step) -> tuple[int, ...]:
    return tuple(entry.bits for key, entry in step.entries.items() if key.phase == "data")


def renamed(step: Step, names: Mapping[str, str]) -> Step:
    """Return a step without the names of wrappers, and with names replaced; a name includes what is below it."""
    entries = {key._replace(name=_renamed(key.name, names)): entry for key, entry in step.entries.items()}
    return replace(step, entries=entries)


def plain(name: str) -> str:
    """Return a name without those of wrappers."""
    return _WRAPPERS.sub("", name)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    of_model = plain(name)
    for old, new in names.items():
        if of_model == old or of_model.startswith(f"{old}."):
            return new + of_model[len(old) :]
    return of_model


def guess(a: Step, b: Step) -> dict[str, str]:
    """Return names of A that B probably calls otherwise: in the same place, with values of the same type, one by one."""
    theirs, ours = _names(b), _names(a)
    lost, new = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    if not lost or len(lost) != len(new) or any(ours[x] != theirs[y] for x, y in zip(lost, new, strict=True)):
        return {}
    return dict(zip(lost, new, strict=True))


def _names(step: Step) -> dict[str, list[tuple[object, ...]]]:
    """Return what there is of each module or parameter, in order."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for key in step.entries:
        if key.name:
            found.setdefault(key.name, []).append((key.phase, key.call, key.slot, key.dtype, key.shape))
    return found


def pairs(a: Step, b: Step) -> list[Pair]:
    """Return what both steps have, in A's order, and what only one has after it."""
    ours, theirs = _by_spot(a), _by_spot(b)
    spots: Iterable[Spot] = {**dict.fromkeys(ours), **dict.fromkeys(theirs)}
    found = []
    for spot in spots:
        (first, one), (second, other) = ours.get(spot, (None, None)), theirs.get(spot, (None, None))
        algorithms = "" if first is None else first.algorithm, "" if second is None else second.algorithm
        found.append(Pair(spot, one, other, (_kind(first), _kind(second)), algorithms))
    return found


def _by_spot(step: Step) -> dict[Spot, tuple[Key, Entry]]:
    return {(key.phase, key.name, key.call, key.slot): (key, entry) for key, entry in step.entries.items()}


def _kind(key: Key | None) -> str:
    return "" if key is None else f"{key.dtype} {_shape(key.shape)}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
