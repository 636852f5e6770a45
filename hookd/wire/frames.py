"""The stacks of other threads, which go on meanwhile. Stdlib only; used on both sides."""

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
def held() -> Iterator[dict[int, FrameType]]:
    """Yield the innermost frames of all threads by ident; only inside of this may `f_back` be followed.

    CPython 3.11 makes the object of a frame when it is asked for, and may collect garbage then. A weak reference's callback
    lets the thread go on, its function returns, and the object is written into what the stack has there by now: `f_back`
    gave dicts and booleans, and could have ended the process (Python/frame.c `_PyFrame_MakeAndSetFrameObject`, 3.11.7). So
    nothing is collected meanwhile, as in `sys._current_frames` itself. Until 3.10 frames are objects from their beginning, and
    from 3.12 on garbage is collected between instructions alone.
    """
    stops = _MAKES_FRAMES and gc.isenabled()
    if stops:
        gc.disable()
    frames = sys._current_frames()  # noqa: SLF001  the only way to the stack of another thread
    try:
        yield frames
    finally:
        frames.clear()  # the calling thread's own frame leads to whoever holds the dict: a cycle
        if stops:
            gc.enable()
