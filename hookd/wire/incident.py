"""Incidents, on a page and in the daemon's store, and lines of the agent's log."""

from __future__ import annotations

from typing import Any, TypedDict


class _Dated(TypedDict):
    seq: int
    """Its number within the process; below 0 for an incident that the daemon has detected."""
    time: float
    """Unix seconds, of the first occurrence."""


class Incident(_Dated, total=False):
    """An incident of a target. Plugins may add fields of their own.

    A page belongs to another process: a reader can rely on `seq` and `time` alone.
    """

    kind: str
    """Such as `nan`, `hang` or `quarantine`."""
    message: str
    """For a person."""
    plugin: str
    """The plugin that reported it."""
    module: str | None
    """The module concerned."""
    step: int | None
    """The step concerned."""
    is_step_absolute: bool
    """Whether `step` counts from the beginning of the training, else from the attach."""
    count: int
    """How often it has occurred; equal incidents of a process are one."""
    last: float
    """Unix seconds of the last occurrence."""
    id: int
    """Its number in the daemon's store."""


class LogLine(_Dated, total=False):
    """A line of the agent's log."""

    level: str
    message: str


class StoredIncident(TypedDict):
    """An incident in the daemon's store."""

    id: int | None
    """Its number, for `hookd report '#ID'`; None until it is stored."""
    boot: str
    """The boot of the machine in which it occurred."""
    pid: int
    """Pid of the process, as the daemon sees it."""
    start: int
    """Start of the process in clock ticks since the boot: with `boot` and `pid`, it names the process."""
    page: int
    """Inode of its page: names the attach."""
    same: str
    """The same for equal incidents of a process."""
    seq: int
    """Its number within the process; below 0 if the daemon has detected it."""
    time: float
    """Unix seconds of the first occurrence."""
    run: str
    rank: str
    kind: str
    module: str | None
    step: int | None
    message: str
    """For a person."""
    owner: int
    """Uid of the user to whom the process belongs; -1 if that is unknown."""
    count: int
    """How often it has occurred."""
    last: float
    """Unix seconds of the last occurrence."""
    last_seq: int
    """The number of the last occurrence within the process."""
    detail: dict[str, Any]
    """The incident as the target reported it."""


class IncidentRow(StoredIncident):
    """An incident as `hookd incidents --json` prints it."""

    user: str
    """The name of its owner."""
