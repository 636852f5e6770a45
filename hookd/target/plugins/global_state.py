"""Global state of the training, watched during a plugin's first calls.

A plugin that seeds, draws random numbers or sets torch's default dtype changes the training without any error. Comparing
this state at each call would cost more than the call. A plugin that makes such a mistake makes it at every call, so it is
enough to watch an observer's first calls: each change is undone, and counted as the plugin's error.
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
"""Number of calls of each hook that are watched; it starts again after each change."""

_C = torch._C
_GENERATOR: Any = torch.default_generator


class _Random:
    """The states of torch's and Python's generators."""

    def __init__(self) -> None:
        self.torch = _GENERATOR.get_state()
        self.bytes = ctypes.string_at(self.torch.data_ptr(), self.torch.numel())
        self.python = random.getstate()

    def put_back(self) -> bool:
        """Restore the states; return whether they had changed."""
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


def watch(listener: Listener) -> None:
    """Watch the first calls of an observer's hook."""
    left = FIRST_CALLS

    def first(*values: Any) -> Any:
        nonlocal left
        if is_unreal():  # a trace would record the access to the generator's state
            return listener.call(*values)
        left -= 1
        if left <= 0:
            listener.run = listener.call
        state = _State()
        try:
            result = listener.call(*values)
        except BaseException:
            state.put_back()
            raise
        if changed := state.put_back():
            left, listener.run = FIRST_CALLS, first
            raise PluginError(f"it changed {', '.join(changed)} of the training, which hookd has put back")
        return result

    listener.run = first


class _State:
    """The settings, and the generators' states unless another thread of the training may draw random numbers meanwhile."""

    def __init__(self) -> None:
        # With the grad mode off, hookd itself may have disabled it around this hook, and then enables it again.
        settings = _SETTINGS if torch.is_grad_enabled() else _SETTINGS[1:]
        with unseen():
            self._settings = [(words, get, put, get()) for words, get, put in settings]
            self._numbers = _Random() if _is_alone() else None

    def put_back(self) -> list[str]:
        """Restore the state, and return what had changed, in words."""
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
    """Whether the training has no other thread, which could draw random numbers legitimately."""
    me = threading.get_ident()
    # threading.enumerate() takes a lock, which this thread may hold already if a signal handler interrupted it.
    active = threading._active.copy()  # type: ignore[attr-defined]
    return all(ident == me or ident in OWN for ident in active)
