"""`hookd config`: check a configuration file before a daemon reads it."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import ConfigError, PluginError
from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.outputs import CheckedConfig
    from hookd.tool.config import ServeConfig


@click.group()
def config() -> None:
    """Check configuration files."""


@config.command()
@click.argument("path", type=click.Path(path_type=Path))
@options.json
def check(*, path: Path, as_json: bool) -> None:
    """Check a configuration file, and report every mistake.

    Exit code 2 if there is one.
    """
    from hookd.tool.config import SETTINGS
    from hookd.tool.config import check as read

    parsed = read(path)
    if missing := list(_missing_plugins(parsed)):
        raise ConfigError("\n".join(missing))
    for text in _unknown_users(parsed):
        output.say(f"hookd: warning: {text}")
    if parsed.web_config is not None:
        from hookd.tool.daemon.web import access

        for text in access.check(parsed.web_config):
            output.say(f"hookd: warning: {text}")
    if as_json:
        settings = {name: _plain(getattr(parsed, name)) for name in SETTINGS}
        data: CheckedConfig = {"path": str(path), "settings": settings}
        output.emit(data)
    else:
        click.echo(f"{path}: fine")


def _missing_plugins(config: ServeConfig) -> Iterator[str]:
    """Yield an error for each configured plugin that is not on this machine, so that an attach would fail."""
    from hookd.tool.attach import sources
    from hookd.tool.config import plugins_asked_for

    for where, specs in plugins_asked_for(config).items():
        for spec in specs:
            try:
                sources.find(spec.name, config.plugin_dirs)
            except PluginError as error:
                yield f"{where}: {error.message}. {error.hint}"


def _unknown_users(config: ServeConfig) -> Iterator[str]:
    for number, rule in enumerate(config.rules, 1):
        if rule.user is not None and not rule.user.isdecimal():
            try:
                pwd.getpwnam(rule.user)
            except KeyError:
                yield f"[[rule]] {number} user: this machine has no user {rule.user!r}, so nothing is attached by this rule"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
