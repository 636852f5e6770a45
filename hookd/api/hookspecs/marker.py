"""The mark of a hook. Runs in the target."""

from __future__ import annotations

from hookd._pluggy import HookspecMarker

hookspec = HookspecMarker("hookd")
