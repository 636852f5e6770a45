"""Collect the digests of a step."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from hookd import of_tensor, tensor_ref
from hookd_fingerprint.records import Key, Keys, Reading, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hookd import Context, Digest

MOST_KEYS = 1 << 17
"""Limit on the keys of a stream."""
PLAIN = (Tensor, Parameter)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


class Place(NamedTuple):
    """Where a tensor is met.

    Attributes:
        phase: see the plugin.
        name: of the module or the parameter.
        call: number of the call, or of the optimizer's step, in the training step.
        slot: which of its tensors.
    """

    phase: str
    name: str
    call: int
    slot: str


class Entries:
    """The entries of the step in progress, and the keys of the stream.

    Args:
        context: of the plugin.
        complete: called when a record that was closed is complete.
    """

    def __init__(self, context: Context, complete: Callable[[], None]) -> None:
        self._context, self._complete = context, complete
        self._keys = Keys()
        self._record = Record(self._keys, complete)
        self._calls: dict[str, int] = {}
        # By the ids of tensors of this step.
        self._known: dict[int, tuple[Callable[[], Any], int, Digest | Reading]] = {}

    def begin_call(self, name: str) -> int:
        """Return the number of a call in this step, from 0."""
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return number

    def call(self, name: str) -> int:
        """Return the number of the last call that has begun."""
        return self._calls.get(name, 0)

    def add_state(self, place: Place, state: Tensor) -> None:
        """Add the state of a generator, whose type and shape mean nothing."""
        self._append((*place, "", ()), self._read(state))

    def add(self, place: Place, tensor: Any) -> None:
        """Add a tensor. One that the training computes is read once, though it comes out of one module and goes into others."""
        is_plain = type(tensor) in PLAIN  # then an attribute is torch's own, without the detour of `of_tensor`
        node = tensor.grad_fn if is_plain else of_tensor(tensor, "grad_fn")
        found = self._read(tensor) if node is None else self._read_once(tensor)
        if isinstance(found, Reading) and found.is_lost:  # a nested tensor, for example, has no shape
            self._record.unread += 1
            return
        dtype, shape = (
            (tensor.dtype, tensor.shape) if is_plain else (of_tensor(tensor, "dtype"), of_tensor(tensor, "shape"))
        )
        self._append((*place, _name(dtype), tuple(shape)), found)

    def _append(self, key: Key, found: Digest | Reading) -> None:
        if isinstance(found, Reading):
            found.add(key)
        else:
            self._record.append(key, found)

    def add_number(self, row: dict[str, object], name: str, number: Tensor) -> None:
        """Put a number on a device into a row of the step's settings, once it has arrived."""
        record = self._record

        def arrive(numbers: list[float]) -> None:
            row[name] = numbers[0]
            record.arrive()

        if self._context.is_readable(number) and number.numel() == 1:
            record.wait()
            copy = number.detach().clone()  # the optimizer is about to change it
            self._context.later([copy], arrive, record.arrive)

    def _read(self, tensor: Any) -> Digest | Reading:
        reading = Reading(self._record)
        digest = self._context.digest(tensor, reading.arrive, reading.lose)
        return reading if digest is None else digest

    def _read_once(self, tensor: Any) -> Digest | Reading:
        version = of_tensor(tensor, "_version")
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        found = self._read(tensor)
        self._known[id(tensor)] = tensor_ref(tensor), version, found
        return found

    def close(self, step: int, head: Mapping[str, object]) -> Record:
        """End the step, and return its record."""
        record = self._record
        record.close(step, head)
        if len(self._keys) > MOST_KEYS:  # shapes that change without end
            self.begin_stream()
        self.clear()
        return record

    def begin_stream(self) -> None:
        """Forget the keys: the next reader knows none."""
        self._keys = Keys()
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self._record = Record(self._keys, self._complete)
        self._calls.clear()
        self._known.clear()
