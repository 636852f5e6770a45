"""Requests and answers of trials: JSON between `hookd plugin check` or `bench` and the processes that run plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, final

if TYPE_CHECKING:
    from collections.abc import Mapping


class TriedPlugin(TypedDict):
    """A plugin to be tried by `hookd.testing.measure`."""

    entry: str
    """`MODULE:CLASS`."""
    directory: str
    """Of its sources."""
    out: str
    """Path of the file for the answer."""


class TrialRequest(TypedDict):
    """Plugins to be tried one after the other."""

    what: str
    """`check` or `bench`."""
    options: Mapping[str, object]
    """For the `configure` of each."""
    plugins: list[TriedPlugin]


class RehearsalRequest(TriedPlugin):
    """A daemon plugin to be run by `hookd.testing.rehearsal`."""

    name: str
    files: list[str]
    """Paths of its sources."""
    options: Mapping[str, object]
    """For its `configure`."""


class Refusal(TypedDict):
    """The answer for a plugin that cannot be tried."""

    refused: str
    """Why not."""
    hint: str
    """Advice for its author; empty if there is none."""


class _SourceLine(TypedDict):
    file: str
    """Of the plugin's line concerned; empty if the plugin has no part in it."""
    line: int
    """Its number; 0 if the plugin has no part in it."""


class PlacedRefusal(Refusal, total=False):
    """A refusal, with the line of the plugin at which it failed."""

    file: str
    line: int


class HookCost(TypedDict):
    """The cost of a hook."""

    calls: int
    ns: float
    """Median time per call, in ns."""
    low_ns: float
    """Lower quartile of the time per call, in ns."""
    high_ns: float
    """Upper quartile of the time per call, in ns."""


class BenchedHook(HookCost):
    """The cost of a hook, with its memory."""

    peak_bytes: float
    """Median of the peak memory of a call, in bytes."""
    kept_bytes: float
    """Median of the memory that a call has left allocated, in bytes."""


class DeclaredMetric(_SourceLine):
    """A metric that a plugin declares, with the line that does."""

    kind: str
    """`counter`, `gauge` or `histogram`."""
    name: str
    """With `hookd_PLUGIN_`."""
    labels: list[str]


class Raised(_SourceLine):
    """An exception of a hook."""

    hook: str
    error: str
    """Its class and message."""


class Trained(TypedDict):
    """The outcome of a training with a plugin."""

    state: str
    """Of the plugin at the end, such as `active` or `quarantined`."""
    errors: float
    """Calls that raised, or returned a value that the plugin may not return."""
    logs: list[str]
    """The lines of the agent's log."""
    mutates: bool
    """Whether the plugin declares that it changes the training."""
    broken: str
    """The exception of the training; empty if there was none."""
    difference: str
    """The first difference to the training without the plugin; empty if there is none."""


@final
class CheckAnswer(Trained):
    """The answer for a plugin that was checked."""

    hooks: dict[str, HookCost]
    """By name; hooks of single events only."""
    metrics: list[DeclaredMetric]
    raised: list[Raised]
    """One for each line that raised."""
    uncalled: list[str]
    """Hooks of modules that the small models never called."""


class Bounds(TypedDict):
    """A ratio with the bounds of its 95 % confidence interval."""

    median: float
    low: float
    high: float


class Benched(TypedDict):
    """The cost of a plugin on one model."""

    hooks: dict[str, BenchedHook]
    """By name."""
    ratio: Bounds
    """CPU time of a step with the plugin, relative to one without it."""
    control: Bounds
    """CPU time of a step without the plugin, relative to another without it."""


@final
class BenchAnswer(TypedDict):
    """The answer for a plugin that was measured."""

    models: dict[str, Benched]
    """By name of the model."""


class RehearsedMetric(TypedDict):
    """A metric that a daemon plugin returned."""

    kind: str
    """`counter` or `gauge`."""
    name: str
    """Without `hookd_PLUGIN_`."""
    help: str
    labels: list[str]


class RehearsalError(_SourceLine):
    """An error of a daemon plugin."""

    hook: str
    text: str
    """Its class and message."""


@final
class RehearsalAnswer(TypedDict):
    """The answer for a daemon plugin that was run."""

    hooks: list[str]
    """Those that it implements."""
    metrics: list[RehearsedMetric]
    raised: list[RehearsalError]
    """Equal errors are one."""
