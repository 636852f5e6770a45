"""Find the tensors in the inputs and outputs of modules."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, deque
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

from hookd.api.passive import attributes_of, class_attribute, classes_of, module_name_of, peek, plainly

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 64
DEPTH = 8
PLAIN = (int, float, complex, str, bytes)
"""Types that cannot contain a tensor."""
FROZEN = getattr(sys.modules["builtins"], "frozendict", dict)
"""An immutable dict, new in CPython 3.15; not a subclass of `dict`."""


def tensors(value: Any) -> list[Tensor]:
    """Find the tensors nested in tuples, lists, dicts, deques, dataclasses and namespaces, in order, at most 64 of them.

    Args:
        value: inputs or an output of a module. Iterators are not consumed, since some never end, and objects of other
            types are not searched. `is_whole` checks that nothing was left out.

    Returns:
        The tensors themselves, of any dtype and device; never keep them.
    """
    kind = sys.modules["torch"].Tensor
    if issubclass(type(value), kind):
        return [value]
    found: list[Tensor] = []
    _collect(value, found, kind, DEPTH)
    return found


def is_tensor(value: object) -> bool:
    """Whether the type of an object is a tensor class; unlike `isinstance`, this does not ask the object itself."""
    return issubclass(type(value), sys.modules["torch"].Tensor)


def versions(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the version counters of the tensors among the inputs of a module; an in-place operation raises one.

    Returns:
        One number for each tensor that `tensors` finds; -1 for one created in inference mode, which has no counter.
    """
    kind = sys.modules["torch"].Tensor
    is_inference, version = kind.is_inference, kind._version.__get__  # noqa: SLF001 - there is no public name
    with plainly():
        return tuple([-1 if is_inference(tensor) else version(tensor) for tensor in tensors((inputs, kwargs))])


def is_whole(value: Any) -> bool:
    """Return whether `tensors` finds every tensor in the inputs or the output of a module. Slow; for rare events."""
    return len(tensors(value)) < LIMIT and _is_seen(value, sys.modules["torch"].Tensor, DEPTH)


def _is_seen(value: Any, kind: type, depth: int) -> bool:
    if issubclass(type(value), kind):
        return depth > 0
    if _is_plain(value):
        return True
    if depth == 0:
        return False
    inside = items(value)
    if inside is None:
        return False
    return all(
        _is_seen(item, kind, depth - 1) if at < LIMIT else _is_plain(item) and not issubclass(type(item), kind)
        for at, item in enumerate(inside)
    )


def _is_plain(value: Any) -> bool:
    # Objects of module torch are dtypes and devices; an array of numpy contains no tensor.
    return value is None or issubclass(type(value), (*PLAIN, Enum)) or module_name_of(type(value)) in ("torch", "numpy")


def _collect(value: Any, found: list[Tensor], kind: type, depth: int) -> None:
    if len(found) >= LIMIT or depth == 0:
        return
    if issubclass(type(value), kind):
        found.append(value)
    elif value is not None and not issubclass(type(value), PLAIN):
        for item in (items(value) or ())[:LIMIT]:
            _collect(item, found, kind, depth - 1)


def items(value: Any) -> tuple[Any, ...] | list[Any] | None:
    """Return the items of a container, bypassing overrides of its class; None for an object of another type.

    This checks the type of the object: `isinstance` would ask the object, and a lazy object would then build its value.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return value  # type: ignore[no-any-return]
    for base in classes_of(kind):
        read = _READERS.get(id(base))
        if read is not None:
            return read(value)  # type: ignore[no-any-return]
    if class_attribute(kind, "__dataclass_fields__") is not None:  # as is_dataclass() does, but bypassing a metaclass
        return [peek(value, field.name) for field in dataclasses.fields(kind)]
    return None


# By the id of the class: a lookup by the class itself would hash it, which may call code of its metaclass.
_READERS: dict[int, Callable[[Any], Any]] = {
    id(tuple): lambda value: tuple.__getitem__(value, slice(None)),
    id(list): lambda value: list.__getitem__(value, slice(None)),
    id(dict): lambda value: list(dict.values(value)),
    id(FROZEN): lambda value: list(FROZEN.values(value)),
    id(UserDict): lambda value: items(peek(value, "data")),
    id(deque): lambda value: list(deque.__iter__(value)),
    id(SimpleNamespace): lambda value: list(attributes_of(value).values()),
}
