"""Weak references to tensors that the training code may still swap. Runs in the target."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def tensor_ref(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns the tensor while it is alive, and then None; for a parameter it always returns None.

    torch refuses to swap a tensor that has a weak reference (torch/utils/__init__.py `swap_tensors`, 2.2 to 2.14), and
    `module.to()` swaps parameters under `torch.__future__.set_swap_module_params_on_conversion(True)`. So what may be
    a parameter gets none: any leaf that requires a gradient, and any leaf of a class of its own. What may be a buffer,
    any other leaf, is swapped by `load_state_dict` then: of that keep no reference beyond the outermost call.
    """
    return _gone if _may_be_parameter(tensor) else weakref.ref(tensor)


def passing_ref(tensor: Tensor, passing: list[Passing]) -> Callable[[], Tensor | None]:
    """Do the same, and note among `passing` what may be a buffer, so that its reference is ended in time."""
    if _may_be_parameter(tensor):
        return _gone
    if not _is_leaf(tensor):
        return weakref.ref(tensor)
    ref = Passing(tensor)
    passing.append(ref)
    return ref


class Passing:
    """A weak reference that can be ended while the tensor lives."""

    __slots__ = ("_ref",)

    def __init__(self, tensor: Tensor) -> None:
        self._ref: Callable[[], Tensor | None] = weakref.ref(tensor)

    def __call__(self) -> Tensor | None:
        """Return the tensor while it is alive and the reference is not ended."""
        return self._ref()

    def end(self) -> None:
        """Give None from now on."""
        self._ref = _gone


def _is_leaf(tensor: Tensor) -> bool:
    found: bool = sys.modules["torch"].Tensor.is_leaf.__get__(tensor)  # past what a class of tensors has in its place
    return found


def _may_be_parameter(tensor: Tensor) -> bool:
    kind: Any = sys.modules["torch"].Tensor
    return _is_leaf(tensor) and (kind.requires_grad.__get__(tensor) or type(tensor) is not kind)


def _gone() -> None:
    """Stand in for a reference to a tensor that must have none."""
