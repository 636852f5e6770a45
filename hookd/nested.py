"""Find the tensors in what a module was given or gave back. Runs in the target."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, deque
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 64
DEPTH = 8
PLAIN = (int, float, complex, str, bytes)
"""What has no tensor in it."""


def tensors(value: Any) -> list[Tensor]:
    """Find the tensors nested in tuples, lists, dicts, deques, dataclasses and namespaces, in order, at most 64 of them.

    Args:
        value: what a module was called with, or returned. Iterators are not consumed, and objects of other types
            are not looked into: some never end. `is_whole` says whether that has left something out.

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


def is_whole(value: Any) -> bool:
    """Say whether `tensors` finds all that there is in what a module was called with, or returned: it was not cut.

    Takes its time; for what is rare.
    """
    return len(tensors(value)) < LIMIT and _is_seen(value, sys.modules["torch"].Tensor, DEPTH)


def _is_seen(value: Any, kind: type, depth: int) -> bool:
    if isinstance(value, kind):
        return depth > 0
    if _is_plain(value, kind):
        return True
    if depth == 0:
        return False
    items = _items(value)
    if items is None:
        return False
    return all(
        _is_seen(item, kind, depth - 1) if at < LIMIT else _is_plain(item, kind) for at, item in enumerate(items)
    )


def _is_plain(value: Any, kind: type) -> bool:
    # A dtype or a device is of torch's, and an array has no tensor in it.
    is_theirs = type(value).__module__ in ("torch", "numpy") and not isinstance(value, kind)
    return value is None or isinstance(value, (*PLAIN, Enum)) or is_theirs


def _collect(value: Any, found: list[Tensor], kind: type, depth: int) -> None:
    if len(found) >= LIMIT or depth == 0:
        return
    if isinstance(value, kind):
        found.append(value)  # type: ignore[arg-type]
    elif isinstance(value, (tuple, list)):
        for item in value[:LIMIT]:
            _collect(item, found, kind, depth - 1)
    elif value is not None and not isinstance(value, PLAIN):
        for item in (_items(value) or ())[:LIMIT]:
            _collect(item, found, kind, depth - 1)


def _items(value: Any) -> tuple[Any, ...] | list[Any] | None:
    """Give what a container has in it; None for an object of another type."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, (dict, UserDict)):
        return list(value.values())
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None
