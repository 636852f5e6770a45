"""`hookd plugin`: list plugins, and load, change and unload those of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import click

from hookd.errors import PluginError
from hookd.tool.cli import options, output, plugin_check, plugin_new, targets
from hookd.tool.cli.daemon_plugins import in_daemon, show_in_daemon
from hookd.tool.cli.loaded import loaded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hookd.tool.cli.outputs import PluginList
    from hookd.wire.answer import ChangedTarget


@click.group()
def plugin() -> None:
    """List, write and check plugins, and change those of a target."""


plugin.add_command(plugin_new.new)
plugin.add_command(plugin_check.check)
plugin.add_command(plugin_check.bench)


@plugin.command("list")
@click.argument("pid", metavar="[TARGET]", type=options.Pid(), required=False)
@options.plugin_dirs
@options.host
@options.json
def list_(*, pid: int | None, plugin_dirs: tuple[Path, ...], host: str | None, as_json: bool) -> int:
    """List the available plugins, or those of a target.

    Without a TARGET, list the plugins that `-p NAME` can load, and report files of --plugin-dir that are not valid. With a
    TARGET, list the plugins that are loaded there, with their options, and those installed in its environment.
    """
    if pid is not None:
        return loaded(targets.report(pid, targets.daemon(host)), plugin_dirs, as_json=as_json)
    available, broken = installed(plugin_dirs), unreadable(plugin_dirs)
    daemon = in_daemon(plugin_dirs, host)
    if as_json:
        data: PluginList = {
            "plugins": available, "daemon": daemon, "unreadable": [error.as_json() for error in broken],
        }  # fmt: skip
        output.emit(data)
    else:
        rows = [(row["name"], row["version"] or "-", _note(row), row["summary"], row["entry"]) for row in available]
        output.show(output.fill(output.table("PLUGIN", "VERSION", "", "DESCRIPTION", "FROM"), rows))
        show_in_daemon(daemon)
    for error in broken:
        output.complain(error)
    for nothing in without_plugins(plugin_dirs):
        output.say(f"hookd: no plugin in {nothing}")
    return max((error.exit_code for error in broken), default=0)


def _note(row: AvailablePlugin) -> str:
    if row["is_default"]:
        return "by default"
    return "changes training" if row["mutates"] else ""


class AvailablePlugin(TypedDict):
    """A plugin that can be loaded, as `hookd plugin list --json` prints it."""

    name: str
    version: str
    """Empty if its source has none."""
    entry: str
    """`MODULE:CLASS`."""
    origin: str
    """Where its source was found."""
    sha256: str
    """Of its source."""
    summary: str
    """The first line of its docstring."""
    mutates: bool
    """Whether it declares that it changes the training."""
    is_default: bool
    """Whether it is loaded if no plugin is named."""


def installed(plugin_dirs: Sequence[Path]) -> list[AvailablePlugin]:
    """Describe every available plugin from its source; no plugin is imported."""
    from hookd.tool.attach import sources
    from hookd.tool.config import DEFAULT_PLUGINS

    defaults = {spec.name for spec in DEFAULT_PLUGINS}
    plugins: list[AvailablePlugin] = []
    for name in sources.names(plugin_dirs):
        source = sources.find(name, plugin_dirs)
        summary, mutates, _ = sources.read(source)
        is_default = name in defaults
        plugins.append({
            "name": name, "version": source.version, "entry": source.entry, "origin": source.origin,
            "sha256": source.sha256, "summary": summary, "mutates": mutates, "is_default": is_default,
        })  # fmt: skip
    return plugins


def unreadable(plugin_dirs: Sequence[Path]) -> list[PluginError]:
    """Return an error for each file that is not valid Python."""
    from hookd.tool.attach import sources

    entries = [entry for directory in plugin_dirs for entry in sources.in_directory(directory)]
    return [entry for entry in entries if isinstance(entry, PluginError)]


def without_plugins(plugin_dirs: Sequence[Path]) -> list[str]:
    """Describe the directories that have neither plugins, daemon plugins nor invalid files."""
    from hookd.tool.attach import sources

    kinds = ("Plugin", "DaemonPlugin")
    empty = [one for one in plugin_dirs if not any(list(sources.in_directory(one, base=base)) for base in kinds)]
    return [sources.nothing_in(directory) for directory in empty]


TARGET = click.argument("pid", metavar="TARGET", type=options.Pid())
NAME = click.argument("name", metavar="NAME", shell_complete=options.complete_plugin)
SETTINGS = click.argument("settings", metavar="[KEY=VALUE]…", nargs=-1)
TIMEOUT = click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, metavar="S",
                       show_default=True, help="Maximum wait, in seconds, for the training step at which the change takes place.")  # fmt: skip


FORCE = click.option(
    "--force", is_flag=True, help="Load it even if its source has problems that `hookd plugin check` finds."
)


@plugin.command()
@TARGET
@NAME
@SETTINGS
@TIMEOUT
@FORCE
@options.plugin_dirs
@options.host
@options.json
def enable(
    *, pid: int, name: str, settings: tuple[str, ...], force: bool, plugin_dirs: tuple[Path, ...], **how: Any
) -> int:
    """Load a plugin into a target.

    A plugin that changes the training is loaded into all ranks of the job at the same step.
    """
    if not force:
        plugin_check.require_sound([name], plugin_dirs)
    return _change("load", pid, name, settings, plugin_dirs=plugin_dirs, **how)


@plugin.command()
@TARGET
@NAME
@TIMEOUT
@options.host
@options.json
def disable(*, pid: int, name: str, **how: Any) -> int:
    """Unload a plugin from a target.

    A plugin that changes the training is unloaded from all ranks of the job at the same step.
    """
    return _change("unload", pid, name, **how)


@plugin.command()
@TARGET
@NAME
@TIMEOUT
@FORCE
@options.plugin_dirs
@options.host
@options.json
def reload(*, pid: int, name: str, force: bool, plugin_dirs: tuple[Path, ...], **how: Any) -> int:
    """Replace a loaded plugin with the current version of its source.

    Its options and counters are kept. If the new version is refused, the old one keeps running.
    """
    if not force:
        plugin_check.require_sound([name], plugin_dirs)
    return _change("reload", pid, name, plugin_dirs=plugin_dirs, **how)


@plugin.command()
@TARGET
@NAME
@SETTINGS
@TIMEOUT
@options.host
@options.json
def config(*, pid: int, name: str, settings: tuple[str, ...], **how: Any) -> int:
    """Change options of a loaded plugin.

    Options that are not named keep their values; KEY= resets an option to its default. If one option is refused, none is
    changed.
    """
    if not settings:
        raise click.UsageError(f"No options given. Write them as `hookd plugin config {pid} {name} key=value`.")
    return _change("configure", pid, name, settings, **how)


def _change(  # noqa: PLR0913 - the options of four commands
    op: str, pid: int, name: str, settings: tuple[str, ...] = (), *, plugin_dirs: tuple[Path, ...] = (),
    timeout_s: float, host: str | None, as_json: bool,
) -> int:  # fmt: skip
    from hookd.tool.attach.change import change
    from hookd.tool.config import PluginSpec

    spec = PluginSpec.parse(f"{name}:{','.join(settings)}" if settings else name)
    client = targets.daemon(host)
    if client is not None:
        more = [str(directory.absolute()) for directory in plugin_dirs]
        answer = client.change_plugins(pid, op, spec.as_json(), timeout_s=timeout_s, plugin_dirs=more)
    else:
        answer = {"pid": pid, **change(pid, op, spec, plugin_dirs, timeout_s)}
    if as_json:
        output.emit(answer)
    output.say(_outcome(op, name, answer))
    return 0


def _outcome(op: str, name: str, answer: ChangedTarget) -> str:
    ranks, steps = answer["ranks"], answer.get("step", {})
    where = f"process {answer['pid']}" if len(ranks) == 1 else f"all {len(ranks)} ranks"
    change = {"load": "loaded into", "unload": "unloaded from", "configure": "changed in", "reload": "reloaded in"}[op]
    if answer["state"] == "pending":
        return f"{name} will be {change} {where} at the next step, which has not begun yet"
    words = [text for text in steps.values() if text]
    plugin_name = f"{name} {answer['version']}" if answer.get("version") else name
    return f"{plugin_name} was {change} {where}" + (f" at {words[0]}" if words else "")
