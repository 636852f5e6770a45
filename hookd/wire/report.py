"""The report of a target, as the daemon serves it, `hookd report PID --json` prints it and `hookd.read()` returns it.

Numbers that JSON does not have (NaN, infinities) are None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from hookd.wire.hook_error import HookError
    from hookd.wire.identity import Identity
    from hookd.wire.incident import Incident, IncidentRow, LogLine
    from hookd.wire.target import ServedTarget


class Steps(TypedDict):
    """How far the training is."""

    counted: int
    """Steps done since the attach."""
    offset: int | None
    """Steps done before the attach; None if that is unknown."""
    current: int
    """Steps done in the whole training if `is_absolute`, else the same as `counted`."""
    is_absolute: bool
    """Whether `current` counts from the beginning of the training."""
    calls: int
    """Calls of the model before the first step."""
    micro_batches: float | None
    """Mean number of micro-batches of a step since the attach: more than 1 with gradient accumulation; None before the first step."""
    text: str
    """The same in words."""


class ModuleRow(TypedDict):
    """A module of a model, and its metrics."""

    name: str
    """Its name in the model, such as `layers.0.attn`; `(root)` for the model itself."""
    type: str
    """The name of its class; empty if the agent has not described it."""
    root: int
    """The number of the model that it belongs to, from 0."""
    metrics: dict[str, dict[str, Any]]
    """By plugin, then by the metric's name without `hookd_PLUGIN_`; see `Report.metrics` for the values."""


class PluginRow(TypedDict):
    """A plugin that is loaded into a target."""

    name: str
    state: str | None
    """`active`, `probation`, `quarantined` or `disabled`."""
    changes_training: bool | None
    """Whether it is changing the training; None for a plugin that only observes."""
    errors: float
    """Exceptions that it has raised."""
    interval_steps: float | None
    """Its sampled hooks are called once in so many steps."""
    overhead_seconds: float | None
    """Seconds that its hooks have taken; None before anything was measured."""
    call_seconds: float | None
    """Mean duration of one call of its hooks, in seconds."""
    series: int
    """Number of its series."""
    refused_series: float
    """Number of series that were refused, because a label had too many values."""
    options: dict[str, str]
    """The options that the user gave."""
    settings: dict[str, str]
    """All options, with their effective values."""
    source: dict[str, str]
    """Where its code comes from."""
    error: HookError
    """Its last error; empty if there was none."""


class ThreadRow(TypedDict):
    """A thread of a target, and where it was at the last copy of the page."""

    tid: int
    """Its thread id in the target's PID namespace."""
    name: str
    phase: str
    """`other`, `data`, `forward`, `backward`, `optimizer` or `paused`."""
    module: str | None
    """The innermost module that it is inside of."""
    step: int
    """The step that it works on, counted from the attach."""
    events: int
    """Counts its events; a number that does not change belongs to a thread that does not move."""


class Overhead(TypedDict):
    """The cost of hookd in a target."""

    ratio: float | None
    """Share of the time of a step that hookd takes; None before anything was measured."""
    seconds: float | None
    """Seconds taken by hookd and its plugins."""
    own_seconds: float | None
    """Seconds taken by hookd without its plugins."""


class CurvePoint(TypedDict):
    """The duration of some consecutive steps."""

    step: int
    """The last of them, counted from the attach."""
    time: float
    """Unix seconds of its end."""
    seconds: float
    """Their median duration."""
    longest: float
    """The longest duration, in seconds."""


class Elsewhere(TypedDict):
    """The incidents of another rank of the same run."""

    rank: str
    pid: int
    incidents: int
    """Their number."""
    message: str | None
    """Of the last one."""


class PageReport(TypedDict):
    """Everything that the page of a target says, by module, plugin and incident."""

    pid: int
    identity: Identity
    """The process, as the agent describes it: `run`, `rank`, `world_size`, `python`, `torch`, `agent_version` and more."""
    state: str
    """According to the agent: `starting`, `running`, `detaching`, `detached` or `exited`."""
    step: Steps
    step_seconds: float | None
    """Mean time of the last steps, of at most 16; None if it is not known."""
    modules: list[ModuleRow]
    """In the order in which the agent met them, parents before children."""
    metrics: dict[str, dict[str, Any]]
    """Metrics without a module: `metrics[plugin][name]` is a number, a histogram `{"count", "sum", "mean"}`, or, for a metric
    with labels, a list of `{**labels, "value": …}`."""
    observed: dict[str, float]
    """Number of modules by coverage: `observed`, `compiled`, `scripted` and so on."""
    plugins: list[PluginRow]
    overhead: Overhead
    incidents: list[Incident]
    """Equal incidents are one."""
    threads: list[ThreadRow]
    logs: list[LogLine]
    """The last lines of the agent's log."""
    dropped_series: int
    """Series that the page has no space for."""


class Report(PageReport, total=False):
    """The report of a target."""

    target: ServedTarget
    """The daemon's row; absent if the page was read without a daemon."""
    user: str
    """The user to whom the process belongs, if there is no `target`."""
    curve: list[CurvePoint]
    """The durations of its last steps, if they were asked for."""
    elsewhere: list[Elsewhere]
    """The other ranks of its run that have incidents."""


class RunReport(TypedDict):
    """A run, as `hookd report RUN --json` prints it."""

    run: str
    targets: list[Report]
    incidents: list[IncidentRow]


class IncidentReport(TypedDict):
    """An incident, as `hookd report '#NUMBER' --json` prints it."""

    incident: IncidentRow
    target: Report | None
    """Its target; None if it is gone."""
