"""The Python stack of the training code, for incidents."""

from __future__ import annotations

import sys
from typing import Any

_HOOKD = (__file__.rpartition("/api/")[0] + "/", "<hookd")


def training_stack(most: int = 12) -> list[str]:
    """Return the training code's own part of the stack of a hook: without frames of the plugin, of hookd and of torch.

    Args:
        most: number of frames, the innermost ones.

    Returns:
        Each as `file:line function`, the outermost first. Empty outside of a hook.
    """
    lines: list[str] = []
    frame: Any = sys._getframe(1)  # noqa: SLF001
    is_plugin = True  # the plugin's frames are those inside of the first one of hookd, which has called it
    while frame is not None and len(lines) < most:
        code = frame.f_code
        if code.co_filename.startswith(_HOOKD):
            is_plugin = False
        elif not is_plugin and "/torch/" not in code.co_filename:
            lines.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return lines[::-1]
