"""Commands that plugins add to `hookd`: looked up for an unknown command, and for the help page.

Only plugins whose source names the hook `register_commands` are imported; one that fails is reported and left out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hookd.errors import HookdError, PluginError, worded
from hookd.tool.cli import output

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import click

    from hookd.tool.daemon.plugins.discovery import AvailablePlugin


def commands(taken: Collection[str]) -> dict[str, click.Command]:
    """Return the commands of all plugins by name; never raise.

    Args:
        taken: names of hookd's own commands: a plugin's command of such a name is reported and left out.
    """
    added: dict[str, click.Command] = {}
    try:
        for plugin in _available():
            _try_add(added, plugin, taken)
    except Exception as error:  # noqa: BLE001  a broken plugin must not hide the help page
        output.complain(HookdError(f"the commands of plugins cannot be found: {worded(error)}"))
    return added


def _available() -> Iterator[AvailablePlugin]:
    from hookd.tool.config import load
    from hookd.tool.daemon.plugins import discovery

    config = load({}, os.environ)
    found, _ = discovery.find(config.plugin_dirs, config.allows)
    return (plugin for plugin in found if plugin.has("register_commands"))


def add(added: dict[str, click.Command], plugin: AvailablePlugin, taken: Collection[str]) -> None:
    """Import a plugin, and add the commands that its `register_commands` returns to `added`, by name.

    Raises:
        PluginError: it cannot be imported, or it returns an object that is not a command, or a name that is taken.
            Exceptions of its hook propagate unchanged.
    """
    _, hooks = plugin.load()
    function, _ = hooks.get("register_commands", (tuple, ()))
    for command in function():
        added[_name(plugin.name, command, {*taken, *added})] = command


def _try_add(added: dict[str, click.Command], plugin: AvailablePlugin, taken: Collection[str]) -> None:
    try:
        add(added, plugin, taken)
    except (Exception, SystemExit) as error:  # noqa: BLE001  one plugin must not remove the others' commands
        message = error.message if isinstance(error, HookdError) else f"{plugin.name}: {worded(error)}"
        output.complain(PluginError(f"plugin {message}"))


def _name(plugin: str, command: object, taken: Collection[str]) -> str:
    """Return the name of a command that a plugin adds.

    Raises:
        PluginError: it is not a command, or its name is taken.
    """
    import click

    if not isinstance(command, click.Command) or not command.name:
        raise PluginError(f"{plugin}: register_commands returned a {type(command).__name__}, not a command")
    if command.name in taken:
        raise PluginError(f"{plugin}: a command {command.name!r} already exists")
    return command.name
