"""Calls around a fork of the process.

They exist because a child such as a DataLoader worker is not a target. `posix.register_at_fork` cannot be undone, so its
empty trampolines are the only residue that a detach leaves. They are kept in an attribute of `sys`, where the next agent of
the process finds them.
"""

from __future__ import annotations

import ctypes
import functools
import posix
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_ATTRIBUTE = "_hookd_at_fork"


class AtFork(NamedTuple):
    """The functions to call at a fork.

    Attributes:
        before: called in the thread that forks; returns whether to call `returned`.
        in_parent: called in the same thread of the parent, before the call that forks returns.
        returned: called in the parent's main thread, at its next safe point after that call. An exception of it is raised in
            the program's code that runs there, as with a signal handler. If it returns a frame, it is called again once that
            has ended.
        in_child: called in the child.
    """

    before: Callable[[], bool]
    in_parent: Callable[[], None]
    returned: Callable[[], FrameType | None]
    in_child: Callable[[], None]


def set_at_fork(calls: AtFork | None) -> None:
    """Set the functions to call at every fork, None for none."""
    slot: list[AtFork] | None = getattr(sys, _ATTRIBUTE, None)
    if slot is None:
        if calls is None:
            return
        slot = []
        setattr(sys, _ATTRIBUTE, slot)
        _register(slot)
    slot[:] = [] if calls is None else [calls]


def _register(slot: list[AtFork]) -> None:
    # These functions use no global names, because the module is gone after a detach.
    class Returned:
        def __bool__(self) -> bool:
            waiting.clear()
            for calls in [*slot]:
                frame = calls.returned()
                if frame is not None:
                    frame.f_locals["_hookd_last"] = Last()
            return False

    returned = Returned()
    pointer = ctypes.c_void_p(id(returned))
    call, queue = ctypes.pythonapi["PyObject_IsTrue"], ctypes.pythonapi["Py_AddPendingCall"]
    waiting: list[ctypes.c_void_p] = []

    class Last:
        """A local of a frame: it goes when that ends. The interpreter may overlook what a pending call itself would queue."""

        # Not a Python function: see below.
        __del__ = staticmethod(functools.partial(queue, call, pointer))

    def before(_kept: Returned = returned) -> None:  # keeps the object alive whose address the interpreter gets below
        for calls in [*slot]:
            if calls.before() and not waiting:
                waiting.append(pointer)

    def in_parent() -> None:
        for calls in [*slot]:
            calls.in_parent()

    def in_child() -> None:
        while slot:
            slot.pop().in_child()

    posix.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    # Not in a Python function: the interpreter would make the pending call at once, before that function returns.
    posix.register_at_fork(after_in_parent=functools.partial(functools.reduce, queue, waiting, call))
