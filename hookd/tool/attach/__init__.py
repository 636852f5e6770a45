"""Attach to a running process, detach from it, and talk to its agent. Never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookd.tool.attach.control import Control, detach
    from hookd.tool.attach.live import attach
    from hookd.tool.attach.request import AttachRequest, AttachResult

__all__ = ["AttachRequest", "AttachResult", "Control", "attach", "detach"]

_MODULES = {
    "Control": "control",
    "detach": "control",
    "attach": "live",
    "AttachRequest": "request",
    "AttachResult": "request",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    The import takes 50 ms, and commands that only inspect processes do not need it.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
