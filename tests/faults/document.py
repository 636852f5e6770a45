"""The fault table in `docs/reliability.md`: rows by their title, between two marks; the text around is written by hand."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.faults.scene import Fault, Said

BEGIN, END = "<!-- begin faults -->\n", "<!-- end faults -->\n"
HEAD = "| Fault | How it is made | What hookd said | After | What was lost |\n|---|---|---|---|---|\n"
MAX_WORDS = 420


def write(path: Path, played: Iterable[tuple[Fault, Said]], order: Iterable[Fault]) -> None:
    """Put rows into the file; those of faults that were not played stay as they are."""
    text = path.read_text() if path.exists() else f"{BEGIN}{END}"
    before, _, rest = text.partition(BEGIN)
    old, _, behind = rest.partition(END)
    rows = {line.split(" | ")[0].strip("| "): line for line in old.splitlines() if line.startswith("| ")}
    rows |= {_cell(one.title): row(one, said) for one, said in played}
    lines = [rows[_cell(one.title)] for one in order if _cell(one.title) in rows]
    path.write_text(f"{before}{BEGIN}{_provenance()}\n\n{HEAD}{''.join(line + chr(10) for line in lines)}{END}{behind}")


def row(one: Fault, said: Said) -> str:
    """Give a line of the table."""
    after = "" if said.seconds is None else f"{said.seconds:.1f} s"
    words = said.words if said.words.startswith("(") else f"`{_cell(said.words)[:MAX_WORDS].replace('`', chr(39))}`"
    return f"| {_cell(one.title)} | {_cell(one.made)} | {words} | {after} | {_cell(said.lost)} |"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def _provenance() -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        f"Last written on {when} by `python -m tests.faults`: hookd {__version__}, torch {version('torch')}, Python "
        f"{platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.0f}."
    )
