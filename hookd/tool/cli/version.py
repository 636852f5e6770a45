"""`hookd version`: print the version."""

from __future__ import annotations

import platform

import click

from hookd.tool.cli import options, output
from hookd.version import __version__


@click.command()
@options.json
def version(*, as_json: bool) -> None:
    """Print the version of hookd and of the Python that runs it."""
    versions = {"hookd": __version__, "python": platform.python_version()}
    if as_json:
        output.emit(versions)
    else:
        click.echo(f"hookd {versions['hookd']} (Python {versions['python']})")
