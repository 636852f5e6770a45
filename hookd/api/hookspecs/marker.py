"""The marker of hooks."""

from __future__ import annotations

from hookd._pluggy import HookspecMarker

hookspec = HookspecMarker("hookd")
