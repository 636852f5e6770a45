"""The fault table in `docs/reliability.md`: rows by their title, between two marks; the text around is written by hand."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from hookd.version import __version__
from tests.support import titled_rows
from tests.support.titled_rows import cell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.faults.scene import Fault, Said

HEAD = "| Fault | How it is made | What hookd said | After | What was lost |\n|---|---|---|---|---|\n"
MAX_WORDS = 420


def write(path: Path, played: Iterable[tuple[Fault, Said]], order: Iterable[Fault]) -> None:
    """Put rows into the file; those of faults that were not played stay as they are."""
    rows = {one.title: row(one, said) for one, said in played}
    titles = [one.title for one in order]
    titled_rows.write(path, "faults", provenance=_provenance(), head=HEAD, rows=rows, titles=titles)


def row(one: Fault, said: Said) -> str:
    """Return a line of the table."""
    after = "" if said.seconds is None else f"{said.seconds:.1f} s"
    words = said.words if said.words.startswith("(") else f"`{cell(said.words)[:MAX_WORDS].replace('`', chr(39))}`"
    return f"| {cell(one.title)} | {cell(one.made)} | {words} | {after} | {cell(said.lost)} |"


def _provenance() -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"Last written on {when} by `python -m tests.faults`: hookd {__version__}, torch {version('torch')}, Python "
        f"{platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.0f}."
    )
