"""Calls around a fork of the process: a DataLoader worker is no target. Runs in the target.

`posix.register_at_fork` cannot be undone, so its empty trampolines are the only residue that a detach leaves. They are
kept where the next agent of the process finds them: as an attribute of `sys`.
"""

from __future__ import annotations

import ctypes
import functools
import posix
import sys
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTRIBUTE = "_hookd_at_fork"


class AtFork(NamedTuple):
    """What to call at a fork.

    Attributes:
        before: in the thread that forks; returns whether `returned` is to be called.
        in_parent: in the same thread, while the call that forks is still under way.
        returned: in the parent's main thread, at its next safe point after that call. What this raises is raised in the
            code of the program that runs there, as what a signal handler raises.
        in_child: in the child.
    """

    before: Callable[[], bool]
    in_parent: Callable[[], None]
    returned: Callable[[], None]
    in_child: Callable[[], None]


def set_at_fork(calls: AtFork | None) -> None:
    """Have these called at every fork from now on; None: nothing."""
    slot: list[AtFork] | None = getattr(sys, _ATTRIBUTE, None)
    if slot is None:
        if calls is None:
            return
        slot = []
        setattr(sys, _ATTRIBUTE, slot)
        _register(slot)
    slot[:] = [] if calls is None else [calls]


def _register(slot: list[AtFork]) -> None:
    # No name of a module's globals inside: the module that defines this is gone after a detach.
    class Returned:
        def __bool__(self) -> bool:
            for one in [*slot]:
                one.returned()
            waiting.clear()
            return False

    returned = Returned()
    pointer = ctypes.c_void_p(id(returned))
    waiting: list[ctypes.c_void_p] = []

    def before(_kept: Returned = returned) -> None:  # its address is what the interpreter is given below
        for one in [*slot]:
            if one.before() and not waiting:
                waiting.append(pointer)

    def in_parent() -> None:
        for one in [*slot]:
            one.in_parent()

    def in_child() -> None:
        while slot:
            slot.pop().in_child()

    posix.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    # Not in a function of Python: the interpreter would make the call at once, before that function has returned.
    call, queue = ctypes.pythonapi["PyObject_IsTrue"], ctypes.pythonapi["Py_AddPendingCall"]
    posix.register_at_fork(after_in_parent=functools.partial(functools.reduce, queue, waiting, call))
