"""The identity of a target, as its agent publishes it in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from hookd.wire.agent import Source
    from hookd.wire.hook_error import HookError


class PluginSettings(TypedDict):
    """A plugin, as the page describes it."""

    options: dict[str, str]
    """The options that the user gave."""
    settings: dict[str, str]
    """All options, with their effective values."""
    source: Source
    error: HookError
    """Its last error; empty if there was none."""


class Identity(TypedDict, total=False):
    """A target. A reader checks every value, and whether it is there: the page belongs to another process."""

    agent_version: str
    protocol: int
    """Of the page."""
    pid: int
    """As the target sees it, like `ppid`."""
    ppid: int
    start_ticks: int
    """Start of the process in clock ticks since the boot, as the target sees it; 0 without /proc."""
    started: float
    """The same in unix seconds."""
    attached: float
    """Unix seconds."""
    python: str
    torch: str
    script: str
    run: str
    is_named: bool
    """Whether a person or a scheduler has given the run its name; otherwise it is the script's."""
    rank: int
    local_rank: int
    world_size: int
    control: str
    """Path of the control socket, as the target sees it; empty at first."""
    method: str
    """`attach`, `run`, `start`, or `test` for the agent of `hookd.testing`, which daemons do not serve."""
    uid: int
    user: str
    step_offset: int | None
    """Steps done before the attach; None if that is unknown."""
    keep: bool
    """Whether the agent stays if nobody holds a lease on it."""
    plugins: dict[str, PluginSettings]
    """By name."""
    sent_away: bool
    """Whether somebody has asked for the detach, so that the agent does not leave by itself."""
    exception: dict[str, str]
    """The exception that Python printed last, at the end of the program: `type`, `message`, `where` (the line that raised it)
    and `module` (the innermost module that it has left)."""
