"""Output of commands: data as tables or JSON on stdout, messages and errors on stderr."""

from __future__ import annotations

import json
import os
import re
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
"""Maximum width of a table in a file or a pipe, in columns; the tables of `status` and `report` keep to 80."""
NARROWEST = 40
_NUMBER = re.compile(r"(?<=\d) (?=(?:%|[µmn]?s|min|h|[kKMGT]i?B|bytes|times)(?!\w))|(?<=rank) (?=\d)|(?<=step) (?=\d)")
"""The space between a number and what it belongs to."""


def emit(data: Any) -> None:
    """Print data as JSON, with NaN and infinities as strings, and flush: a script may be waiting."""
    click.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))
    sys.stdout.flush()


def say(message: str) -> None:
    """Print a message on stderr; it may quote a target."""
    click.echo(plain(message, lines=True), err=True)


def complain(error: HookdError) -> None:
    """Print an error and its hint on stderr."""
    say(f"hookd: error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def fail(error: HookdError, *, as_json: bool) -> int:
    """Print an error, with `--json` also as an object on stdout, and return its exit code."""
    complain(error)
    if as_json:
        emit(error.as_json())
    return error.exit_code


def table(*columns: str, title: str | None = None) -> Table:
    """Create an empty table; a column whose name starts with `>` is right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return made


def fill(empty: Table, rows: Iterable[Sequence[str]]) -> Table:
    """Add rows of plain text, which may be a target's; square brackets are not markup."""
    from rich.text import Text

    for row in rows:
        empty.add_row(*(Text(plain(cell, lines=True)) for cell in row))
    return empty


def show(*renderables: Table | str) -> None:
    """Print tables and lines on stdout.

    They are styled on a terminal only (NO_COLOR applies); elsewhere they are `WIDTH` columns wide.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    for renderable in renderables:
        console.print(renderable)


def columns() -> int:
    """Return the line width: the terminal's; without a terminal COLUMNS, or 80."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and len(text) < 5 and int(text) >= NARROWEST else 80


def wrap(text: str, indent: str = "  ") -> str:
    """Wrap text, which may be a target's, to the line width; all lines but the first are indented.

    A number stays on one line with its unit, `rank` or `step`.
    """
    text = _NUMBER.sub("\0", plain(text, lines=True))  # which has no NUL
    lines = textwrap.fill(text, columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")
