"""Weak references to tensors that the training code may still swap."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def tensor_ref(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns the tensor while it is alive, and then None; always None for a parameter.

    torch refuses to swap a tensor that has a weak reference (torch/utils/__init__.py `swap_tensors`, 2.2 to 2.14), and
    `module.to()` swaps parameters under `torch.__future__.set_swap_module_params_on_conversion(True)`. So a possible
    parameter gets no reference: any leaf that requires a gradient, and any leaf of a tensor subclass. With that setting,
    `load_state_dict` also swaps buffers, which may be any other leaf: keep no reference to a leaf beyond the outermost call.
    """
    return _gone if _may_be_parameter(tensor) else weakref.ref(tensor)


def passing_ref(tensor: Tensor, passing: list[Passing]) -> Callable[[], Tensor | None]:
    """Return a reference as `tensor_ref` does; append one to a possible buffer to `passing`, whose owner ends it in time."""
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
        """Return None from now on."""
        self._ref = _gone


def _is_leaf(tensor: Tensor) -> bool:
    is_leaf: bool = sys.modules["torch"].Tensor.is_leaf.__get__(tensor)  # bypasses overrides of a tensor subclass
    return is_leaf


def _may_be_parameter(tensor: Tensor) -> bool:
    kind: Any = sys.modules["torch"].Tensor
    return _is_leaf(tensor) and (kind.requires_grad.__get__(tensor) or type(tensor) is not kind)


def _gone() -> None:
    """Return None, in place of a reference to a tensor that must not have one."""
