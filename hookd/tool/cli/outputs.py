"""The objects that commands print with `--json`, except those that `hookd.wire` or the module of the command defines.

`docs/json_reference.py` describes them, and makes a schema of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.errors import ErrorAnswer
    from hookd.tool.check.report import ReportRow
    from hookd.tool.cli.loaded import InstalledRow, LoadedPlugin
    from hookd.tool.cli.plugin import AvailablePlugin
    from hookd.tool.cli.plugin_check import BenchRow
    from hookd.tool.cli.ps import ProcessRow
    from hookd.tool.cli.status import ServedError, ServedStatus
    from hookd.tool.cli.targets import Skipped
    from hookd.tool.daemon.plugins.rows import DaemonPluginRow
    from hookd.wire.answer import Attached, DetachedTarget
    from hookd.wire.incident import IncidentRow
    from hookd.wire.target import ErrorRow, Server


class Processes(TypedDict):
    """Processes that hookd is attached to or can be attached to."""

    processes: Sequence[ProcessRow]


class Failed(TypedDict, total=False):
    """The error of the process with the worst exit code; absent if all went well."""

    error: str
    """The message, for a person."""
    reason: str
    """A stable word; [troubleshooting](../troubleshooting.md) has all of them."""
    hint: str
    """How to solve it, for a person."""
    exit_code: int
    """Of the command."""


class WithMetrics(Failed, total=False):
    """Where the metrics are."""

    metrics: str
    """Their address; absent if no process could be attached to."""


class Attaches(WithMetrics):
    """The outcome for each process, and what was skipped."""

    targets: Sequence[Attached | ErrorRow]
    skipped: Sequence[Skipped]


class Detaches(Failed):
    """The outcome for each process."""

    targets: Sequence[DetachedTarget | ErrorRow]


class RootDaemonRow(TypedDict):
    """A daemon of root, which answers only root."""

    pid: int
    control: str
    """Path of its control socket."""
    url: str | None
    """Of its page; None if nothing answers at the address in its command line."""


class Status(TypedDict):
    """Where metrics are served, and the attached targets."""

    daemon: Server | None
    root_daemon: RootDaemonRow | None
    """The daemon of root; None if `daemon` answers, or there is none."""
    foreground: Sequence[Server]
    """Foreground attaches."""
    targets: Sequence[ServedStatus | ServedError]


class TopRow(TypedDict):
    """A target."""

    pid: int
    run: str
    rank: str
    user: str
    state: str
    """`running`, `paused`, `hangs` (others wait for it), `waits` (for a rank that hangs), or how it ended."""
    step: int
    """Steps done in the whole training if `is_absolute`, else since the attach."""
    is_absolute: bool
    steps_per_s: float | None
    step_s: float | None
    """Mean duration of a step, in seconds."""
    overhead_ratio: float | None
    """Share of step time that hookd and its plugins took last; null before the first step that was measured."""
    rss_bytes: float | None
    """Resident memory."""
    loss: float | None
    incidents: int
    message: str | None
    """How it ended, where it hangs or waits, or its most important incident; null without any."""


class TopTarget(TopRow):
    """A target and its modules."""

    modules: Sequence[dict[str, str | float | None]]
    """A row for each module, by the names of the columns."""


class PluginList(TypedDict):
    """The plugins that can be loaded."""

    plugins: Sequence[AvailablePlugin]
    daemon: Sequence[DaemonPluginRow]
    """Daemon plugins."""
    unreadable: Sequence[ErrorAnswer]
    """Files of plugin directories that are not valid."""


class LoadedPlugins(TypedDict):
    """The plugins of a target."""

    pid: int
    plugins: Sequence[LoadedPlugin]
    in_target: Sequence[InstalledRow]
    """The plugins that are installed in its environment."""


class PluginReports(TypedDict):
    """The outcome of the checks."""

    plugins: Sequence[ReportRow]
    ok: bool
    """Whether there are warnings at most."""


class BenchRows(TypedDict):
    """The costs of the plugins of a file, a folder or a distribution."""

    plugins: Sequence[BenchRow]


class NewPlugin(TypedDict):
    """A project that was created."""

    plugin: str
    """Name of the plugin."""
    directory: str
    files: Sequence[str]
    """Paths of the files."""


class CheckedConfig(TypedDict):
    """A valid configuration."""

    path: str
    """Of the file."""
    settings: dict[str, object]
    """The effective settings by name; [operations](../operations.md) explains them."""


class CheckRow(TypedDict):
    """A finding."""

    name: str
    """The subject of the check."""
    state: str
    """`ok`, `note` (worth knowing) or `bad` (in the way)."""
    found: str
    cure: str
    """How to fix it; empty if there is nothing to fix."""


class Checks(TypedDict):
    """The obstacles to an attach."""

    ok: bool
    """Whether nothing is in the way."""
    checks: Sequence[CheckRow]


class Incidents(TypedDict):
    """The stored incidents. With `--follow`, each is printed on a line of its own, without this object."""

    incidents: Sequence[IncidentRow]


class Versions(TypedDict):
    """The versions of hookd and of the Python that runs it."""

    hookd: str
    python: str


class TraceFile(TypedDict):
    """A trace that was written."""

    pid: int
    path: str
    """Of the file."""
    steps: int
    """Number of steps in it."""
    first: int
    """Number of its first step, as the target counts."""
    bytes: int
    """Uncompressed size."""
    pause_s: float
    """How long torch's profiler blocked the training to start, to stop and to write, in seconds."""
    all_threads: bool
    """Whether it shows all threads, or only the thread that makes the steps and those of the backward."""
    is_cut: bool
    """Whether it has fewer steps than were asked for, because the target's memory grew."""
