"""`hookd plugin`: which plugins there are, and those of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hookd.errors import PluginError
from hookd.tool.cli import options, output, plugin_check, plugin_new, targets
from hookd.tool.cli.hosted import in_daemon, show_in_daemon
from hookd.tool.cli.loaded import loaded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@click.group()
def plugin() -> None:
    """Look at plugins, and change those of a target."""


plugin.add_command(plugin_new.new)
plugin.add_command(plugin_check.check)
plugin.add_command(plugin_check.bench)


@plugin.command("list")
@click.argument("pid", metavar="[TARGET]", type=options.Pid(), required=False)
@options.plugin_dirs
@options.host
@options.json
def list_(*, pid: int | None, plugin_dirs: tuple[Path, ...], host: str | None, as_json: bool) -> int:
    """List the plugins that `-p NAME` finds, and the files of --plugin-dir that cannot be read.

    With a TARGET list those that are loaded there, with their options, and those that its own environment has.
    """
    if pid is not None:
        return loaded(targets.report(pid, targets.daemon(host)), plugin_dirs, as_json=as_json)
    found, broken = installed(plugin_dirs), unreadable(plugin_dirs)
    hosted = in_daemon(plugin_dirs, host)
    if as_json:
        output.emit({"plugins": found, "daemon": hosted, "unreadable": [error.as_json() for error in broken]})
    else:
        rows = [(one["name"], one["version"] or "-", _habit(one), one["summary"], one["entry"]) for one in found]
        output.show(output.fill(output.table("PLUGIN", "VERSION", "", "WHAT IT DOES", "FROM"), rows))
        show_in_daemon(hosted)
    for error in broken:
        output.complain(error)
    return max((error.exit_code for error in broken), default=0)


def _habit(one: dict[str, Any]) -> str:
    if one["is_default"]:
        return "by default"
    return "changes training" if one["mutates"] else ""


def installed(plugin_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Describe every plugin that can be found, from its source: nothing is imported."""
    from hookd.tool.attach import sources
    from hookd.tool.config import DEFAULT_PLUGINS

    defaults = {spec.name for spec in DEFAULT_PLUGINS}
    found = []
    for name in sources.names(plugin_dirs):
        source = sources.find(name, plugin_dirs)
        summary, mutates, _ = sources.read(source)
        is_default = name in defaults
        found.append({
            "name": name, "version": source.version, "entry": source.entry, "origin": source.origin,
            "sha256": source.sha256, "summary": summary, "mutates": mutates, "is_default": is_default,
        })  # fmt: skip
    return found


def unreadable(plugin_dirs: Sequence[Path]) -> list[PluginError]:
    """Give an error for each file that is no Python."""
    from hookd.tool.attach import sources

    found = [one for directory in plugin_dirs for one in sources.in_directory(directory)]
    return [one for one in found if isinstance(one, PluginError)]


TARGET = click.argument("pid", metavar="TARGET", type=options.Pid())
NAME = click.argument("name", metavar="NAME")
SETTINGS = click.argument("settings", metavar="[KEY=VALUE]…", nargs=-1)
TIMEOUT = click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=10.0, metavar="S",
                       show_default=True, help="Seconds that it may take until the training's next step.")  # fmt: skip


@plugin.command()
@TARGET
@NAME
@SETTINGS
@TIMEOUT
@options.plugin_dirs
@options.host
@options.json
def enable(*, pid: int, name: str, settings: tuple[str, ...], plugin_dirs: tuple[Path, ...], **how: Any) -> int:
    """Load a plugin into a target; one that changes the training, into all ranks of its job at one step."""
    return _change("load", pid, name, settings, plugin_dirs=plugin_dirs, **how)


@plugin.command()
@TARGET
@NAME
@TIMEOUT
@options.host
@options.json
def disable(*, pid: int, name: str, **how: Any) -> int:
    """Take a plugin out of a target; one that changes the training, out of all ranks of its job at one step."""
    return _change("unload", pid, name, **how)


@plugin.command()
@TARGET
@NAME
@TIMEOUT
@options.plugin_dirs
@options.host
@options.json
def reload(*, pid: int, name: str, plugin_dirs: tuple[Path, ...], **how: Any) -> int:
    """Put the present source of a loaded plugin in the place of the old one; options and counters go on.

    What is refused changes nothing: the old one goes on.
    """
    return _change("reload", pid, name, plugin_dirs=plugin_dirs, **how)


@plugin.command()
@TARGET
@NAME
@SETTINGS
@TIMEOUT
@options.host
@options.json
def config(*, pid: int, name: str, settings: tuple[str, ...], **how: Any) -> int:
    """Change options of a loaded plugin; those that are not named stay, KEY= takes one back.

    Refused options change nothing.
    """
    if not settings:
        raise click.UsageError(f"Which options? Write them as `hookd plugin config {pid} {name} key=value`.")
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
        more = {"plugin_dirs": [str(directory.absolute()) for directory in plugin_dirs]}
        answer = client.change_plugins(pid, op, spec.as_json(), timeout_s=timeout_s, **more)
    else:
        answer = {"pid": pid, **change(pid, op, spec, plugin_dirs, timeout_s)}
    if as_json:
        output.emit(answer)
    output.say(_told(op, name, answer))
    return 0


def _told(op: str, name: str, answer: dict[str, Any]) -> str:
    ranks, steps = answer["ranks"], answer.get("step", {})
    where = f"process {answer['pid']}" if len(ranks) == 1 else f"all {len(ranks)} ranks"
    what = {"load": "loaded into", "unload": "taken out of", "configure": "changed in", "reload": "reloaded in"}[op]
    if answer["state"] == "pending":
        return f"{name} will be {what} {where} at the next step, which has not come yet"
    words = [text for text in steps.values() if text]
    of = f"{name} {answer['version']}" if answer.get("version") else name
    return f"{of} was {what} {where}" + (f" at {words[0]}" if words else "")
