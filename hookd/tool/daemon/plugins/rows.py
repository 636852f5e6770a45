"""Daemon plugins and their panels, as the daemon describes them to its clients."""

from __future__ import annotations

from typing import TypedDict

from hookd.wire.hook_error import HookError


class PluginHookError(HookError):
    """An error of a daemon plugin."""

    plugin: str
    """Its name."""


class AvailableRow(TypedDict):
    """A daemon plugin."""

    name: str
    version: str
    sha256: str
    """Of its source."""
    origin: str
    """Where its source was found."""
    entry: str
    """`MODULE:CLASS`."""
    state: str | None
    """One of `worker.STATES`; None if no daemon runs it."""
    error: HookError


class DaemonPluginRow(AvailableRow, total=False):
    """A daemon plugin, with what a daemon that runs it knows."""

    hooks: list[str]
    """The hooks that it implements; empty until it is imported."""
    errors: int
    """Number of its errors."""
    seconds: float
    """Time spent in it."""
    skipped: int
    """Calls that were not made, because it was quarantined or too many calls waited."""
    series_dropped: int
    """Series that were dropped over a limit."""


class PanelRow(TypedDict):
    """A table of a daemon plugin, limited in size."""

    plugin: str
    """Its name."""
    title: str
    columns: list[str]
    rows: list[list[str | float | None]]
    """Cells by column: short printable text, not escaped for HTML, or numbers."""
