"""The table of attacks in `docs/security.md`: rows by title, between two marks; the text around them is written by hand."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING

from hookd.version import __version__
from tests.support import titled_rows
from tests.support.titled_rows import cell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.attacks.attack import Attack, Result

HEAD = "| Attack | By | Tries | Got through | Measured |\n|---|---|---|---|---|\n"


def write(path: Path, results: Iterable[tuple[Attack, Result]], order: Iterable[Attack]) -> None:
    """Write the rows of the attacks that were made; those of others stay as they are."""
    rows = {one.title: row(one, result) for one, result in results}
    titles = [one.title for one in order]
    titled_rows.write(path, "attacks", provenance=_provenance(), head=HEAD, rows=rows, titles=titles)


def row(one: Attack, result: Result) -> str:
    """Return a line of the table."""
    got_through = str(result.succeeded) if result.tries else "not tried"
    return f"| {cell(one.title)} | {one.actor} | {result.tries:,} | {got_through} | {cell(result.seen)} |"


def _provenance() -> str:
    when, kernel = time.strftime("%Y-%m-%d", time.gmtime()), platform.release().partition("-")[0]
    return (
        f"Last written on {when} by `make attacks`: hookd {__version__}, Python {platform.python_version()}, Linux "
        f"{kernel}, {os.cpu_count()} cores."
    )
