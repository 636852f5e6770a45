"""State of the whole process or thread that belongs to the training, watched while a plugin is new. Runs in the target.

A plugin that seeds, draws random numbers or sets torch's default dtype makes the training another one without any error.
To compare all of that at each call would cost more than the call. Authors make these mistakes at every call, so an
observer's first ones are enough: each change is put back and counted as the plugin's error.
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import TYPE_CHECKING, Any, Tuple  # noqa: UP035  see `_Setting`

import torch

from hookd.errors import PluginError
from hookd.target.boot.spawn import OWN
from hookd.target.tensors.torch_state import is_unreal, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.plugins.listeners import Listener

FIRST_CALLS = 4
"""Calls of each hook that are watched; the count begins anew at each change."""

_C = torch._C
_GENERATOR: Any = torch.default_generator


class _Random:
    """The states of torch's and Python's generators."""

    def __init__(self) -> None:
        self.torch = _GENERATOR.get_state()
        self.bytes = ctypes.string_at(self.torch.data_ptr(), self.torch.numel())
        self.python = random.getstate()

    def put_back(self) -> bool:
        """Whether they had changed."""
        state = _GENERATOR.get_state()
        is_same = ctypes.string_at(state.data_ptr(), state.numel()) == self.bytes
        if not is_same:
            _GENERATOR.set_state(self.torch)
        if random.getstate() != self.python:
            random.setstate(self.python)
            is_same = False
        return not is_same


_Setting = Tuple[str, "Callable[[], Any]", "Callable[[Any], Any]"]  # noqa: UP006  this syntax is valid on every Python
_SETTINGS: tuple[_Setting, ...] = (
    ("the grad mode", torch.is_grad_enabled, _C._set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("the deterministic algorithms", torch.are_deterministic_algorithms_enabled, _C._set_deterministic_algorithms),
)


def watch(one: Listener) -> None:
    """Watch the first calls of an observer's hook."""
    left = FIRST_CALLS

    def first(*values: Any) -> Any:
        nonlocal left
        if is_unreal():  # a trace would note what is asked of the generator's state
            return one.call(*values)
        left -= 1
        if left <= 0:
            one.run = one.call
        state = _State()
        try:
            result = one.call(*values)
        except BaseException:
            state.put_back()
            raise
        if changed := state.put_back():
            left, one.run = FIRST_CALLS, first
            raise PluginError(f"it changed {', '.join(changed)} of the training, which hookd has put back")
        return result

    one.run = first


class _State:
    """The settings, and the random numbers unless another thread of the training may draw some meanwhile."""

    def __init__(self) -> None:
        # Off: that may be hookd's doing around a hook that looks at tensors, and then hookd also switches it on again.
        settings = _SETTINGS if torch.is_grad_enabled() else _SETTINGS[1:]
        with unseen():
            self._settings = [(words, get, put, get()) for words, get, put in settings]
            self._numbers = _Random() if _is_alone() else None

    def put_back(self) -> list[str]:
        """Put back what has changed, and return it in words."""
        changed = []
        with unseen():
            if self._numbers is not None and self._numbers.put_back():
                changed.append("the random numbers")
            for words, get, put, was in self._settings:
                if get() != was:
                    put(was)
                    changed.append(words)
        return changed


def _is_alone() -> bool:
    """Whether no other thread of the training's is there, which would draw random numbers by right."""
    me = threading.get_ident()
    # threading.enumerate() takes a lock, which a thread that a signal handler of the training has interrupted may hold.
    active = threading._active.copy()  # type: ignore[attr-defined]
    return all(ident == me or ident in OWN for ident in active)
