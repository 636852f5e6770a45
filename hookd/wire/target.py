"""Targets, and the daemons that serve them, as the daemon describes them to its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, final

from hookd.errors import ErrorAnswer

if TYPE_CHECKING:
    from hookd.wire.report import Steps


class Hang(TypedDict):
    """The part of a target in a hang."""

    role: str
    """`stands`: it hangs; `waits`: it waits for ranks that hang."""
    waits_for: list[str]
    """Those ranks."""
    basis: str
    """The evidence for the verdict."""
    phase: str
    module: str | None
    step: int | None
    for_s: float
    """Seconds since its last event."""
    at_least: bool
    """Whether it may be longer than `for_s`, because nobody watched before."""
    where: str
    """The place in words."""
    message: str
    """The hang as it was reported first."""


class Ongoing(TypedDict):
    """An incident that is not over."""

    time: float
    """Unix seconds of its begin."""
    message: str


class TargetRow(TypedDict):
    """A target in the daemon's list."""

    pid: int
    """As the daemon sees it."""
    start_ticks: int
    """Start of the process in clock ticks since the boot: with the pid, it names the process."""
    run: str
    rank: str
    local_rank: int
    world_size: int
    state: str
    """`attached`, `ended` (the process has ended by itself without an error), `lost` (it is gone otherwise), `corrupt` (its page
    cannot be trusted) or `detached`."""
    reason: str | None
    """Why it has ended, in a word or two; see docs/deaths.md."""
    ended: float | None
    """Unix seconds of its end."""
    how: str | None
    """How its process ended, in words."""
    step: Steps | None
    """Progress at the last copy of its page."""
    heartbeat_age_s: float | None
    """Seconds since its last event; None once it has ended."""
    hang: Hang | None
    ongoing: dict[str, Ongoing]
    """By kind, what the daemon has detected and is not over."""
    incidents: int
    """Number of its incidents; equal ones are one."""
    script: str
    method: str
    """How the agent came: `attach`, `run` or `start`."""
    keep: bool
    """Whether the agent stays if nobody holds a lease on it."""
    is_held: bool
    """Whether this daemon holds a lease on the agent."""
    started: float
    """Unix seconds of the start of the process."""
    attached: float
    """Unix seconds of the attach."""
    python: str
    torch: str
    agent_version: str
    uid: int
    """The user to whom it belongs; -1 if that is unknown."""
    user: str
    """The name of that user."""


class ServedTarget(TargetRow):
    """A target, and how its metrics are served."""

    series_dropped: int
    """Number of its series that the limits exclude from /metrics."""


@final
class ErrorRow(ErrorAnswer):
    """A process for which a command has failed."""

    pid: int


class BackingOff(TypedDict):
    """A process whose attach by rule failed and will be tried again."""

    pid: int
    failures: int
    reason: str
    """Of the last failure; see docs/troubleshooting.md."""
    error: str
    """The message of the last failure."""
    again_in_s: float
    """Seconds until the next try."""


class Server(TypedDict):
    """A daemon, or a foreground attach that serves its targets itself."""

    version: str
    pid: int
    url: str
    """Where it serves /metrics, without this path."""
    control: str
    """Path of its control socket."""
    started: float
    """Unix seconds."""
    is_embedded: bool
    """Whether it is a foreground attach."""
    rules: int
    """Number of its rules for attaching."""
    backing_off: list[BackingOff]


class ServerStatus(Server):
    """A daemon with its targets."""

    targets: list[TargetRow]
