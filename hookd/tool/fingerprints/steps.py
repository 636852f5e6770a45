"""The digests of one training step, and how they arrive from the target.

Plugin `fingerprint` sends them: `plugins/hookd_fingerprint/records.py` describes the records. What the target sends is not trusted.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.errors import ControlError
from hookd.wire.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PHASES = ("random", "data", "weights", "forward", "loss", "backward", "gradients", "state", "update", "buffers")
"""The parts of a step, in the order in which one decides the next."""
COMPARED = (*PHASES, "settings")
"""What `hookd diff` compares: the phases, and the settings of the optimizers."""
REPLICATED = frozenset(("weights", "gradients", "state", "update", "settings"))
"""What replicas of a data-parallel training have in common of COMPARED: their batches differ."""
BEFORE_UPDATE = ("random", "data", "forward", "loss", "backward", "gradients")
"""The parts that every step has."""
ALGORITHMS = XXH3, MIX64 = "xxh3", "mix64"
"""Algorithms of digests, see `hookd.Digest`."""
_ENTRY = struct.Struct("=IIBQddd")
_UNREAD = 255
"""The algorithm of a tensor whose digest did not arrive from its device."""
_MOST_KEYS, _LONGEST_NAME, _MOST_DIMENSIONS = 1 << 20, 1000, 64
_MOST_TEXT = 64 << 20
"""Characters in the keys of a stream, a dimension counts as one. Those that hookd sends have a tenth of them at most."""


class Key(NamedTuple):
    """The place, type and shape of something that was read.

    Attributes:
        phase: one of PHASES.
        name: of the module or the parameter; "" for what belongs to none.
        call: number of the call, or of the optimizer's step, within the training step, from 0.
        slot: `input 0`, `output 0`, `grad of output 0`, `value`, `grad`, or what a generator or an optimizer calls it.
        dtype: as torch names it; "" for what is not a tensor.
        shape: of the tensor.
        algorithm: of the digest, one of ALGORITHMS; the tensor was on a device if it is not XXH3.
    """

    phase: str
    name: str
    call: int
    slot: str
    dtype: str
    shape: tuple[int, ...]
    algorithm: str = XXH3

    def row(self) -> list[object]:
        """Return the key as a file has it, in which XXH3 goes without saying."""
        return list(self[:6] if self.algorithm == XXH3 else self)


class Entry(NamedTuple):
    """The digest and the statistics of something that was read.

    Attributes:
        bits: the digest of all bits; see `hookd.Digest`.
        bad: number of elements that are NaN or infinite.
        norm, least, greatest: of the other elements; 0 if there are none, and for tensors of integers.
    """

    bits: int
    bad: int
    norm: float
    least: float
    greatest: float


@dataclass
class Step:
    """One training step.

    Attributes:
        number: of the step; see `is_absolute`.
        is_absolute: whether it counts from the beginning of the training, rather than from the attach.
        mark: the same for a step on all ranks of a job, which may count otherwise; 0 if there is none. See `hookd.Context.mark`.
        settings: those of the optimizers, a mapping for each group.
        unread: number of tensors that are missing, since they could not be read.
        entries: in the order in which they were read.
    """

    number: int
    is_absolute: bool = False
    settings: Sequence[Mapping[str, object]] = ()
    unread: int = 0
    entries: dict[Key, Entry] = field(default_factory=dict)
    mark: int = 0

    def digest(self) -> str:
        """Return the digest of the step, 16 hexadecimal digits: equal for steps with equal entries and settings."""
        whole = blake2b(digest_size=8)
        for key, entry in self.entries.items():
            whole.update(json.dumps([*key.row(), *entry]).encode())
        whole.update(json.dumps(list(self.settings), sort_keys=True).encode())
        return whole.hexdigest()

    def after(self, before: Step) -> Step:
        """Return this step with the weights that an earlier one has left, where it does not have them itself."""
        updates = {
            key._replace(phase="weights"): entry for key, entry in before.entries.items() if key.phase == "update"
        }
        known = {key.name for key in self.entries if key.phase == "weights"}
        weights = {key: entry for key, entry in updates.items() if key.name not in known}
        is_next = self.number == before.number + 1
        return replace(self, entries={**weights, **self.entries}) if is_next else self

    def lacks(self, other: Step) -> bool:
        """Whether calls, gradients or anything else before the optimizer's step is missing that another step has."""
        spots = {key[:4] for key in self.entries}
        return any(key[:4] not in spots for key in other.entries if key.phase in BEFORE_UPDATE)


class Decoder:
    """Decodes the records of one stream, each of which has the keys that are new."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._text = 0  # characters in them

    def step(self, record: bytes) -> Step:
        """Decode one record.

        Raises:
            ControlError: reason "foreign": it is not what the plugin sends.
        """
        try:
            return self._step(record)
        except (ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError) as exc:
            raise ControlError(f"the process has sent something else than a fingerprint: {exc}", reason="foreign",
                               hint="Is it a training that you trust?") from exc  # fmt: skip

    def _step(self, record: bytes) -> Step:
        end = 4 + int.from_bytes(record[:4], "little")
        head = json.loads(record[4:end])
        new, at = [key_of(row) for row in head["keys"]], count(head["at"])
        self._text += sum(map(_length, new)) - sum(map(_length, self._keys[at:]))
        self._keys[at:] = new
        if len(self._keys) > _MOST_KEYS or self._text > _MOST_TEXT:
            raise ValueError(f"{len(self._keys)} keys, which are too many or too long")
        step = Step(
            count(head["step"]), head["is_absolute"] is True, settings_of(head["settings"]), count(head["unread"]),
            mark=count(head["mark"]),
        )  # fmt: skip
        for number, bad, algorithm, bits, *ends in _ENTRY.iter_unpack(record[end:]):
            if algorithm == _UNREAD:
                step.unread += 1
                continue
            key = self._keys[number]
            if algorithm:
                key = key._replace(algorithm=ALGORITHMS[algorithm])
            step.entries[key] = Entry(bits, bad, *(one if math.isfinite(one) else 0.0 for one in ends))
        return step


def _length(key: Key) -> int:
    return len(key.name) + len(key.slot) + len(key.dtype) + len(key.shape)


def key_of(row: Any) -> Key:
    """Check the parts of a key.

    Raises:
        ValueError, TypeError: it is not one.
    """
    phase, name, call, slot, dtype, shape, *more = row
    algorithm = more[0] if len(more) == 1 else XXH3
    is_shape = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if phase not in PHASES or not is_shape or len(more) > 1 or algorithm not in ALGORITHMS:
        raise ValueError(f"not a key: {row!r:.100}")
    return Key(phase, text(name), count(call), text(slot), text(dtype), tuple(map(count, shape)), algorithm)


def text(value: Any) -> str:
    """Check a name.

    Raises:
        ValueError: it is not a text, or too long.
    """
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError(f"not a name: {value!r:.100}")
    return printable(value)


def count(value: Any) -> int:
    """Check a number from 0 to 2**63.

    Raises:
        ValueError: it is not one.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a count: {value!r:.100}")
    return value


def settings_of(rows: Any) -> list[dict[str, object]]:
    """Check the settings of optimizers.

    Raises:
        ValueError: they are not a list of flat objects.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not settings")
    return [
        {text(name): value if isinstance(value, (int, float)) else text(value) for name, value in row.items()}
        for row in rows
    ]
