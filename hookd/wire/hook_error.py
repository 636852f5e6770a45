"""The last error of a plugin, as the agent and the daemon describe it."""

from __future__ import annotations

from typing import TypedDict


class HookError(TypedDict, total=False):
    """The last error of a plugin; empty if there was none."""

    hook: str
    text: str
    """Class and message of the exception, or what else went wrong."""
    where: str
    """The line of the plugin; empty if it has no part in it."""
    traceback: str
    """Empty if there is none."""
