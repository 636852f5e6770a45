"""`hookd plugin list PID`: the plugins of a target, with their state, cost and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from hookd.errors import HookdError, worded
from hookd.tool.cli import output
from hookd.wire.agent import PluginConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hookd.tool.cli.outputs import LoadedPlugins
    from hookd.wire.hook_error import HookError
    from hookd.wire.report import PluginRow, Report


class Shadow(TypedDict):
    """The source of a plugin that takes precedence over one of the same name; both empty if it cannot be carried."""

    version: str
    origin: str
    """Where it was found."""


@dataclass(frozen=True)
class Installed:
    """A plugin of the target's own environment.

    Attributes:
        plugin: the agent's description.
        shadowed_by: ours of the same name; None if there is none.
        refused: why ours cannot be carried; None if it can.
    """

    plugin: PluginConfig
    shadowed_by: Shadow | None = None
    refused: str | None = None

    def as_json(self) -> InstalledRow:
        """Return the row that `--json` prints."""
        row = cast("InstalledRow", {**self.plugin, "shadowed_by": self.shadowed_by})
        if self.refused is not None:
            row["refused"] = self.refused
        return row


class InstalledRow(PluginConfig, total=False):
    """A plugin that is installed in the environment of a target."""

    shadowed_by: Shadow | None
    """The plugin of ours with the same name; None if there is none."""
    refused: str
    """Why that one cannot be sent; absent if it can."""


class LoadedPlugin(TypedDict):
    """A plugin of a target."""

    name: str
    version: str | None
    """Of its source, as the next two; None if unknown."""
    sha256: str | None
    origin: str | None
    """Where its source was found."""
    state: str | None
    """`active`, `probation`, `quarantined` or `disabled`."""
    options: dict[str, str]
    """The options that the user gave."""
    settings: dict[str, str]
    """All options, with their effective values."""
    errors: float
    """Exceptions that it has raised."""
    call_seconds: float | None
    """Mean duration of one call of its hooks, in seconds."""
    overhead_seconds: float | None
    """Seconds that its hooks have taken."""
    series: int
    """Number of its series."""
    error: HookError
    """Its last error; empty if there was none."""


KEYS = ("name", "state", "options", "settings", "errors", "call_seconds", "overhead_seconds", "series", "error")


def loaded(report: Report, plugin_dirs: Sequence[Path], *, as_json: bool) -> int:
    """List the plugins of a target with their current options, and those installed in its own environment."""
    rows = [row for row in report["plugins"] if row["state"] is not None]
    there = list(_installed(int(report["pid"]), plugin_dirs))
    if as_json:
        plugins = [cast("LoadedPlugin", {**_source(row), **_chosen(row)}) for row in rows]
        data: LoadedPlugins = {
            "pid": report["pid"], "plugins": plugins, "in_target": [its.as_json() for its in there],
        }  # fmt: skip
        output.emit(data)
        return 0
    table = output.table("PLUGIN", "VERSION", "STATE", "ERRORS", "PER CALL", "SERIES", "GIVEN", "BY DEFAULT")
    output.show(output.fill(table, map(_row, rows)))
    for row in rows:
        for text in error_lines(row["name"], row["error"]):
            output.say(text)
    for its in there:
        if its.shadowed_by is None or its.shadowed_by["version"] != its.plugin.get("version"):
            output.say(_installed_line(its, report["pid"]))
    if report["state"] in {"detaching", "detached", "exited"}:
        output.say(f"process {report['pid']} is {report['state']}: these plugins were loaded until then")
    else:
        output.say(f"`hookd plugin config {report['pid']} NAME key=value` changes their options")
    return 0


def _installed(pid: int, plugin_dirs: Sequence[Path]) -> Iterator[Installed]:
    """Yield the plugins of the target's own environment."""
    from hookd.tool.attach import sources
    from hookd.tool.attach.change import environment

    try:
        plugins = environment(pid)
    except (HookdError, OSError):  # it has ended, or its agent belongs to another user or is older
        return
    ours = sources.names(plugin_dirs)
    for plugin in plugins:
        name = str(plugin.get("name"))
        if name not in ours:
            yield Installed(plugin)
            continue
        try:
            mine = sources.find(name, plugin_dirs)
        except (HookdError, OSError) as exc:  # ours cannot be carried; list the others nevertheless
            refused = exc.message if isinstance(exc, HookdError) else worded(exc)
            yield Installed(plugin, {"version": "", "origin": ""}, refused)
        else:
            yield Installed(plugin, {"version": mine.version, "origin": mine.origin})


def _installed_line(installed: Installed, pid: int) -> str:
    name, ours = installed.plugin["name"], installed.shadowed_by
    who = " ".join(filter(None, (str(name), str(installed.plugin.get("version") or ""))))
    if installed.refused:
        return f"{who} is installed in the target; the one here cannot be sent there: {installed.refused}"
    if ours is None:
        return f"{who} is installed in the target: `hookd plugin enable {pid} {name}` loads it from there"
    mine = " ".join(filter(None, (ours["version"], f"of {ours['origin']}" if ours["origin"] else "")))
    return f"{who} is installed in the target, but is loaded from here: {mine}"


def _chosen(row: PluginRow) -> dict[str, object]:
    return {key: value for key, value in row.items() if key in KEYS}


def _source(row: PluginRow) -> dict[str, str | None]:
    return {key: row["source"].get(key) for key in ("version", "sha256", "origin")}


def _row(row: PluginRow) -> tuple[str, ...]:
    return (
        row["name"], row["source"].get("version") or "-", row["state"] or "-", str(row["errors"] or 0),
        output.seconds(row["call_seconds"]), str(row["series"]), *_options(row),
    )  # fmt: skip


def _options(row: PluginRow) -> Iterator[str]:
    rest = {key: value for key, value in row["settings"].items() if key not in row["options"]}
    for these in (row["options"], rest):
        yield " ".join(f"{key}={value}" for key, value in these.items()) or "-"


def error_lines(name: str, error: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines about a plugin's last error: the author's line, then the traceback.

    The target supplies both.
    """
    if not error.get("text"):
        return
    yield f"{name}: {error['text']}, in the hook {error.get('hook')}"
    if error.get("where"):
        yield f"  at {error['where']}"
    for line in str(error.get("traceback", "")).splitlines():
        yield f"    {output.plain(line)}"
