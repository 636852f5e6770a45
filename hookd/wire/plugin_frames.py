"""Find the line of a plugin's own code that an error came through, or that a thread is at. Stdlib only; used on both sides."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from hookd.wire.frames import innermost_frames

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

_OURS = (__file__.rpartition("wire/")[0], "<hookd", "<frozen ")
_ROOT = "/hookd-payload/"
"""Prefix of the file names in a payload; left out of messages."""
_TAG = re.compile(r"@[0-9a-f]{6}(?=[./])")
"""Suffix that distinguishes files of the same name from two directories, see `hookd/target/boot/loader.py`."""


def author_line(error: BaseException, plugin: object = None) -> str:
    """Return the innermost line of the plugin's code that an error came through.

    Args:
        error: any exception.
        plugin: a plugin, or the name of its module: lines of the same package are the plugin's. If there are none, or with
            None, all lines that are not hookd's are.

    Returns:
        `FILE:LINE, in FUNCTION: source line`; "" if there is none.
    """
    return _line(_authors(traceback.walk_tb(error.__traceback__), plugin))


def author_place(error: BaseException, plugin: object = None) -> str:
    """Return ` (FILE:LINE)` of the same line, for the end of a sentence; "" if there is none."""
    frame = _authors(traceback.walk_tb(error.__traceback__), plugin)
    return f" ({frame.filename}:{frame.lineno})" if frame is not None else ""


def line_at(frame: FrameType | None, plugin: object = None) -> str:
    """Return the innermost line of the plugin's code that a thread is at, in the format of `author_line`.

    Args:
        frame: the thread's innermost frame, inside `hookd.wire.frames.innermost_frames`; None for a thread that has ended.
        plugin: see `author_line`.
    """
    return _line(_authors(reversed(list(traceback.walk_stack(frame))), plugin)) if frame is not None else ""


def line_of(ident: int | None, plugin: object = None) -> str:
    """Return the same line for the thread with this ident; "" if it has ended."""
    with innermost_frames() as frames:
        return line_at(frames.get(ident or 0), plugin)


def _line(frame: traceback.FrameSummary | None) -> str:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" if frame is not None else ""


def _authors(frames: Iterable[tuple[FrameType, int]], plugin: object) -> traceback.FrameSummary | None:
    """Return the plugin's innermost frame; `frames` begin with the outermost."""
    own = (plugin if isinstance(plugin, str) else type(plugin).__module__).partition(".")[0]
    foreign = [entry for entry in frames if not _is_left_out(entry[0].f_code.co_filename)]
    plugins = [entry for entry in foreign if str(entry[0].f_globals.get("__name__")).partition(".")[0] == own]
    innermost = (plugins or foreign)[-1:]
    for summary in traceback.StackSummary.extract(iter(innermost)):
        return traceback.FrameSummary(
            _TAG.sub("", summary.filename.removeprefix(_ROOT)), summary.lineno or 0, summary.name, line=summary.line
        )
    return None


def _is_left_out(filename: str) -> bool:
    return filename.startswith(_OURS) or "/importlib/" in filename
