"""Silence in forked children: a DataLoader worker is no target. Runs in the target.

`posix.register_at_fork` cannot be undone, so one empty trampoline per process is the only residue that a detach leaves.
It is kept where the next agent of the process finds it: as an attribute of `sys`.
"""

from __future__ import annotations

import posix
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTRIBUTE = "_hookd_after_fork"


def set_after_fork(silence: Callable[[], None] | None) -> None:
    """Have `silence` called in every child forked from now on; None: nothing."""
    slot: list[Callable[[], None]] | None = getattr(sys, _ATTRIBUTE, None)
    if slot is None:
        if silence is None:
            return
        slot = []
        setattr(sys, _ATTRIBUTE, slot)
        posix.register_at_fork(after_in_child=_trampoline(slot))
    slot[:] = [] if silence is None else [silence]


def _trampoline(slot: list[Callable[[], None]]) -> Callable[[], None]:
    # No name of a module's globals inside: the module that defines this is gone after a detach.
    def after_in_child() -> None:
        while slot:
            slot.pop()()

    return after_in_child
