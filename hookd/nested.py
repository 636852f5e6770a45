"""Find the tensors in what a module was given or gave back. Runs in the target."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 64
DEPTH = 8


def tensors(value: Any) -> list[Tensor]:
    """Find the tensors nested in tuples, lists, dicts and dataclasses, in order, at most 64 of them.

    Args:
        value: what a module was called with, or returned. Iterators are not consumed, and objects of other types
            are not looked into: some never end.

    Returns:
        The tensors themselves, of any dtype and device; never keep them.
    """
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found, torch.Tensor, DEPTH)
    return found


def versions(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Give the version counters of the tensors that a module is called with: an in-place operation raises one.

    Returns:
        One number for each tensor that `tensors` finds; -1 for one made in inference mode, which has no counter.
    """
    found = tensors((inputs, kwargs))
    return tuple(-1 if one.is_inference() else one._version for one in found)  # noqa: SLF001


def _collect(value: Any, found: list[Tensor], kind: type, depth: int) -> None:
    if len(found) >= LIMIT or depth == 0:
        return
    if isinstance(value, kind):
        found.append(value)  # type: ignore[arg-type]
    elif isinstance(value, (tuple, list)):
        for item in value[:LIMIT]:
            _collect(item, found, kind, depth - 1)
    elif isinstance(value, dict):
        for item in list(value.values())[:LIMIT]:
            _collect(item, found, kind, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found, kind, depth - 1)
