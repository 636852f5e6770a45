"""`hookd version`: print the version."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output
from hookd.version import __version__

if TYPE_CHECKING:
    from hookd.tool.cli.outputs import Versions


@click.command()
@options.json
def version(*, as_json: bool) -> None:
    """Print the version of hookd and of the Python that runs it."""
    versions: Versions = {"hookd": __version__, "python": platform.python_version()}
    if as_json:
        output.emit(versions)
    else:
        click.echo(f"hookd {versions['hookd']} (Python {versions['python']})")
