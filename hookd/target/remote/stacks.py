"""The Python stacks of all threads, for `hookd stack`.

Only function, file and line of a frame are returned: no locals, which `frame.f_locals` would keep alive, and no source lines,
which would have to be read from files.
"""

from __future__ import annotations

import posix
import threading
from typing import TYPE_CHECKING, Any

from hookd.target.boot.spawn import OWN
from hookd.target.entry.threads import is_ours
from hookd.wire.frames import innermost_frames
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from hookd.target.boot.spawn import Thread
    from hookd.wire.stack import PythonFrame, PythonStack, PythonStacks

MOST_THREADS = 256
MOST_FRAMES = 200
"""The most frames of a thread, its innermost ones."""
MOST_NAME = 512


def stacks() -> PythonStacks:
    """Return the stack of each thread of this process, without hookd's own threads.

    Returns:
        `threads`: for each its `tid` (the kernel's number as this process sees it, None for a thread that Python did not
        start), `name`, `frames` (innermost first: `function`, `file`, `line`, `own`: whether it is hookd's), and `left_out`:
        the number of further frames. `left_out`: the number of further threads.
    """
    known = threading._active.copy()  # type: ignore[attr-defined]
    # The threads keep running: each is read once, from its innermost frame outwards.
    threads: list[PythonStack] = []
    main = threading.main_thread()
    with innermost_frames() as running:
        frames = {ident: frame for ident, frame in running.items() if ident not in OWN}
        stacks = [(ident, *_frames(frame)) for ident, frame in list(frames.items())[:MOST_THREADS]]
    for ident, rows, left_out in stacks:
        thread = known.get(ident)
        threads.append(
            {
                # In a forked child the main thread still has its parent's number (CPython before 3.13).
                "tid": posix.getpid() if thread is main else getattr(thread, "native_id", None),
                "name": clean(str(getattr(thread, "name", "thread")), MOST_NAME),
                "frames": rows,
                "left_out": left_out,
            }
        )
    return {"threads": threads, "left_out": max(0, len(frames) - MOST_THREADS)}


def thread_frames(thread: Thread | None) -> list[str]:
    """Return a thread's stack as lines like a traceback's, innermost first, without hookd's own frames."""
    with innermost_frames() as frames:
        frame = frames.get(thread.ident or 0) if thread is not None else None
        rows = [row for row in _frames(frame)[0] if not row["own"]]
    return [f"{row['function']} ({row['file']}:{row['line']})" for row in rows[:16]]


def _frames(frame: Any) -> tuple[list[PythonFrame], int]:
    rows: list[PythonFrame] = []
    more = 0
    while frame is not None:
        if len(rows) < MOST_FRAMES:
            code = frame.f_code
            function = clean(getattr(code, "co_qualname", code.co_name), MOST_NAME)  # 3.11 and newer
            file, is_own = clean(code.co_filename, MOST_NAME), is_ours(code.co_filename)
            rows.append({"function": function, "file": file, "line": frame.f_lineno, "own": is_own})
        else:
            more += 1
        frame = frame.f_back
    return rows, more
