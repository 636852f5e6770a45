"""Draw a view as lines of the screen, each exactly as wide as the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from hookd.tool.cli.top.cells import fit
from hookd.tool.cli.top.table import GAP, fitting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.top.view import View

HELP = """\
Up Down PageUp PageDown Home End   move
Enter           open: from all targets to the modules of one
Esc Backspace   go back; a filter is cleared first
<  >  o  F6     sort by the column to the left, to the right, the next one
I               invert the order
/  F4           show only rows with a text: Enter keeps it, Esc clears it
t  F5           show modules as a tree
p               pause; press p again to continue
+  -            longer, shorter interval
q  F10 Ctrl-C   quit

Targets: STEP/S and A STEP are of the last 5 s; COST is hookd's share of the
time; INC is the number of incidents.
Modules: SHARE, FWD, BWD and SELF (without nested modules) are shares of the
model's time in the last interval. NORM is the norm of the output, GRAD that of
the gradients, both from the last step that was sampled.
Columns without room are omitted. The numbers are read from memory that the
target shares, without a request to it, so watching costs it nothing.
"""
TITLE, HEAD, CURSOR, QUIET = "reverse", "bold", "reverse", "dim"


def title(left: str, right: str, width: int) -> Text:
    """Return the title line: what is shown, and how often it is read."""
    if len(right) > width // 3:
        return Text(fit(left, width), style=TITLE)
    return Text(fit(left, width - len(right) - 1) + " " + right, style=TITLE)


def note(text: str, width: int, style: str = "") -> Text:
    """Return a line of text, shortened at its end."""
    return Text(fit(text if len(text) <= width else text[: width - 1] + "…", width), style=style)


def head(view: View, widths: dict[str, int]) -> Text:
    """Return the line of column titles; the sort column is highlighted."""
    line = Text(style=HEAD)
    for key, width in widths.items():
        column = view.table.columns[key]
        line.append(" " * GAP if line.plain else "")
        line.append(fit(column.title, width, is_right=column.is_right), style=TITLE if key == view.key else "")
    return line


def row(view: View, at: int, widths: dict[str, int], *, is_cursor: bool) -> Text:
    """Return the line of a row."""
    table, cells = view.table, []
    for number, (key, width) in enumerate(widths.items()):
        text = table.cell(at, key)
        text = view.name_of(at) + _label(view, at, text) if number == 0 and view.is_tree else text
        cells.append(fit(text, width, is_right=table.columns[key].is_right))
    return Text((" " * GAP).join(cells), style=CURSOR if is_cursor else table.styles.get(at, ""))


def _label(view: View, at: int, text: str) -> str:
    """Return the last part of a name in a tree, where the parents are shown above it; else the whole name."""
    return text.rpartition(".")[2] if view.depths.get(at) else text


def table(view: View, width: int, height: int) -> Iterator[Text]:
    """Yield the titles and a window of the rows, `height` lines in all."""
    widths = fitting(view.table.columns, width)
    yield head(view, widths)
    rows = view.visible(height - 1)
    for at in rows:
        yield row(view, at, widths, is_cursor=at == view.row)
    for _ in range(height - 1 - len(rows)):
        yield Text(" " * width)


def help_page(width: int, height: int) -> list[Text]:
    """Return the help on the keys and columns."""
    shown = [note(line, width) for line in HELP.splitlines()[:height]]
    return shown + [Text(" " * width)] * (height - len(shown))
