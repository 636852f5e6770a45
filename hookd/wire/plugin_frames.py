"""Which line of a plugin's author an error has come through, or a thread is at. Runs on both sides, stdlib only."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from hookd.wire.frames import held

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

_OURS = (__file__.rpartition("wire/")[0], "<hookd", "<frozen ")
_ROOT = "/hookd-payload/"
"""Where a payload's files say that they are: a person knows them without it."""
_ROOM = re.compile(r"@[0-9a-f]{6}(?=[./])")
"""What tells two directories' files of one name apart in a target, see `hookd/target/boot/loader.py`."""


def author_line(error: BaseException, plugin: object = None) -> str:
    """Give the author's innermost line that an error has come through.

    Args:
        error: anybody's.
        plugin: whose package the author's line is in, or the name of its module; where it has none there, or with None,
            any line that is not hookd's.

    Returns:
        `FILE:LINE, in FUNCTION: the line`; "" where there is none.
    """
    return _line(_authors(traceback.walk_tb(error.__traceback__), plugin))


def author_place(error: BaseException, plugin: object = None) -> str:
    """Give ` (FILE:LINE)` of that line, for the end of a sentence; "" where there is none."""
    found = _authors(traceback.walk_tb(error.__traceback__), plugin)
    return f" ({found.filename}:{found.lineno})" if found is not None else ""


def line_at(frame: FrameType | None, plugin: object = None) -> str:
    """Give the author's innermost line that a thread is at, in the same words.

    Args:
        frame: the thread's innermost, inside of `hookd.wire.frames.held`; None for a thread that has ended.
        plugin: as above.
    """
    return _line(_authors(reversed(list(traceback.walk_stack(frame))), plugin)) if frame is not None else ""


def line_of(ident: int | None, plugin: object = None) -> str:
    """Give the author's line that a thread is at just now, by its ident; "" for one that has ended."""
    with held() as frames:
        return line_at(frames.get(ident or 0), plugin)


def _line(found: traceback.FrameSummary | None) -> str:
    return f"{found.filename}:{found.lineno}, in {found.name}: {found.line}" if found is not None else ""


def _authors(frames: Iterable[tuple[FrameType, int]], plugin: object) -> traceback.FrameSummary | None:
    """Find the author's last frame of those that are given, the outermost first."""
    own = (plugin if isinstance(plugin, str) else type(plugin).__module__).partition(".")[0]
    theirs = [one for one in frames if not _is_left_out(one[0].f_code.co_filename)]
    mine = [one for one in theirs if str(one[0].f_globals.get("__name__")).partition(".")[0] == own]
    found = (mine or theirs)[-1:]
    for summary in traceback.StackSummary.extract(iter(found)):
        return traceback.FrameSummary(
            _ROOM.sub("", summary.filename.removeprefix(_ROOT)), summary.lineno or 0, summary.name, line=summary.line
        )
    return None


def _is_left_out(filename: str) -> bool:
    return filename.startswith(_OURS) or "/importlib/" in filename
