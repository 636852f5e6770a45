"""Stacks of other threads, read while those threads run. Stdlib only; used on both sides."""

from __future__ import annotations

import contextlib
import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_MAKES_FRAMES = sys.version_info[:2] == (3, 11)


@contextlib.contextmanager
def innermost_frames() -> Iterator[dict[int, FrameType]]:
    """Yield the innermost frames of all threads by ident; `f_back` may be followed only inside this context.

    CPython 3.11 creates a frame object when it is first asked for, which may start a garbage collection. A weak reference's
    callback can then let the other thread run and its function return, and CPython writes the frame object into whatever the
    stack contains there by now. `f_back` returned dicts and booleans, and could have crashed the process (Python/frame.c
    `_PyFrame_MakeAndSetFrameObject`, 3.11.7). So collection is off inside the context, as it is in `sys._current_frames`
    itself. Up to 3.10 frames are objects from the start; since 3.12 garbage is collected only between instructions.
    """
    stops = _MAKES_FRAMES and gc.isenabled()
    if stops:
        gc.disable()
    frames = sys._current_frames()  # noqa: SLF001  the only way to the stack of another thread
    try:
        yield frames
    finally:
        frames.clear()  # the calling thread's own frame refers to the dict: a cycle
        if stops:
            gc.enable()
