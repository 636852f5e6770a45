"""Collect the digests of a step, and encode them for the tool.

A record is the length of a JSON object in four bytes, the object, and the entries. The object has the step, its mark (see `Context.mark`), the settings of the
optimizers, the number of tensors that could not be read, and the keys that are new: a key is a list of phase, name, number of the call
in the step, slot, dtype and shape. `at` is the number of the first new key; earlier keys with that number or a higher one are forgotten.
"""

from __future__ import annotations

import json
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from hookd import of_tensor, tensor_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hookd import Context, Digest

ENTRY = Struct("=IIQddd")
"""An entry: the number of its key, elements that are not finite, digest, norm, least and greatest finite element; 0 without numbers."""

NOTHING = (0.0, 0.0, 0.0)
MOST_BYTES, MOST_KEYS = 32 << 20, 1 << 17
"""Limits on the entries of a step, and on the keys of a stream."""
MOST = 0xFFFFFFFF
"""The largest number of elements that are not finite."""

Key = tuple[str, str, int, str, str, "tuple[int, ...]"]
"""A `Place`, with the dtype and the shape of what was there."""


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
    """The entries of the step in progress, and the keys of the stream."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._keys: dict[Key, int] = {}
        self._new: list[Key] = []
        self._entries = bytearray()
        self._calls: dict[str, int] = {}
        self._unread = 0
        self.is_full = False  # whether the step has more entries than are kept
        self._known: dict[int, tuple[Callable[[], Any], int, Digest | None]] = {}  # by the id of a tensor of this step

    def begin_call(self, name: str) -> int:
        """Return the number of a call in this step, from 0."""
        number = self._calls[name] = self._calls.get(name, -1) + 1
        return number

    def call(self, name: str) -> int:
        """Return the number of the last call that has begun."""
        return self._calls.get(name, 0)

    def add_bits(self, place: Place, bits: int) -> None:
        """Add an entry that only has a digest."""
        self._append((*place, "", ()), bits)

    def add(self, place: Place, tensor: Any) -> None:
        """Add a tensor. One that the training computes is read once, though it comes out of one module and goes into others."""
        is_plain = type(tensor) in PLAIN  # then an attribute is torch's own, without the detour of `of_tensor`
        node = tensor.grad_fn if is_plain else of_tensor(tensor, "grad_fn")
        digest = self._context.digest(tensor) if node is None else self._digest_once(tensor)
        if digest is None:
            self._unread += 1
            return
        dtype, shape = (
            (tensor.dtype, tensor.shape) if is_plain else (of_tensor(tensor, "dtype"), of_tensor(tensor, "shape"))
        )
        key = (*place, _name(dtype), tuple(shape))
        found = digest.summary
        if found is None:
            self._append(key, digest.bits)
            return
        bad = found.nans + found.infs
        ends = NOTHING if bad == found.count else (found.norm, found.min, found.max)
        self._append(key, digest.bits, min(bad, MOST), ends)

    def _digest_once(self, tensor: Any) -> Digest | None:
        version = of_tensor(tensor, "_version")
        ref, then, digest = self._known.get(id(tensor), (None, 0, None))
        if ref is None or ref() is not tensor or then != version:
            digest = self._context.digest(tensor)
            self._known[id(tensor)] = tensor_ref(tensor), version, digest
        return digest

    def _append(self, key: Key, bits: int, bad: int = 0, ends: tuple[float, float, float] = NOTHING) -> None:
        if len(self._entries) >= MOST_BYTES:
            self.is_full = True
            return
        number = self._keys.get(key)
        if number is None:
            number = self._keys[key] = len(self._keys)
            self._new.append(key)
        self._entries += ENTRY.pack(number, bad, bits, *ends)

    def record(self, head: Mapping[str, object]) -> bytes:
        """Return the record of the step."""
        at = len(self._keys) - len(self._new)
        whole = json.dumps({**head, "unread": self._unread, "at": at, "keys": self._new}).encode()
        return len(whole).to_bytes(4, "little") + whole + self._entries

    def know(self) -> None:
        """Note that the tool has the keys of the last record."""
        self._new = []
        if len(self._keys) > MOST_KEYS:  # shapes that change without end
            self.begin_stream()

    def begin_stream(self) -> None:
        """Forget the keys: the next reader knows none."""
        self._keys.clear()
        self._new = []

    def clear(self) -> None:
        """Forget the step."""
        self._entries.clear()
        self._calls.clear()
        self._known.clear()
        self.is_full = False
        self._unread = 0
