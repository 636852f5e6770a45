"""`hookd config`: look at a configuration file before a daemon does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookd.cli import options, output


@click.group()
def config() -> None:
    """Look at configuration files."""


@config.command()
@click.argument("path", type=click.Path(path_type=Path))
@options.json
def check(*, path: Path, as_json: bool) -> None:
    """Check a configuration file: every mistake is named, exit code 2 if there is one."""
    from hookd.config import SETTINGS
    from hookd.config import check as read

    found = read(path)
    if found.web_config is not None:
        from hookd.daemon import access

        access.check(found.web_config)
    if as_json:
        output.emit({"path": str(path), "settings": {name: _plain(getattr(found, name)) for name in SETTINGS}})
    else:
        click.echo(f"{path}: fine")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
