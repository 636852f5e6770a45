"""What commands write: data as tables or JSON on stdout, talk and errors on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from hookd.tool.reports.wording import finite, number, percent, plain, seconds, shorten, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

    from hookd.errors import HookdError

__all__ = [
    "columns", "complain", "emit", "fail", "fill", "finite", "number", "percent", "plain", "say", "seconds", "shorten", "show",
    "span", "table", "wrap",
]  # fmt: skip

WIDTH = 160
"""The most columns of a table that goes into a file or a pipe; the tables of `status` and `report` keep to 80."""
NARROWEST = 40


def emit(data: Any) -> None:
    """Print data as JSON (NaN and infinities as strings, for JSON has none) and flush: a script may be waiting."""
    click.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))
    sys.stdout.flush()


def say(message: str) -> None:
    """Print talk, on stderr; it may quote a target."""
    click.echo(plain(message, lines=True), err=True)


def complain(error: HookdError) -> None:
    """Print an error and what the reader can do, on stderr."""
    say(f"hookd: error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def fail(error: HookdError, *, as_json: bool) -> int:
    """Print an error, with `--json` also as an object on stdout; return its exit code."""
    complain(error)
    if as_json:
        emit(error.as_json())
    return error.exit_code


def table(*columns: str, title: str | None = None) -> Table:
    """Make an empty table; a column whose name starts with `>` is aligned to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return made


def fill(empty: Table, rows: Iterable[Sequence[str]]) -> Table:
    """Add rows of plain text (square brackets in a command line are no markup); it may be a target's."""
    from rich.text import Text

    for row in rows:
        empty.add_row(*(Text(plain(cell, lines=True)) for cell in row))
    return empty


def show(*renderables: Table | str) -> None:
    """Print tables and lines on stdout: styled on a terminal only (and as NO_COLOR says), wide when nobody looks."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    for renderable in renderables:
        console.print(renderable)


def columns() -> int:
    """Give the width that lines should keep: the terminal's; without one what COLUMNS says, or 80."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) >= NARROWEST else 80


def wrap(text: str, indent: str = "  ") -> str:
    """Break a line for people, of text that may be a target's; what follows the first part is indented."""
    text = plain(text, lines=True)
    return textwrap.fill(text, columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
