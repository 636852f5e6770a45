"""A table that stores columns as lists, so that a view can sort ten thousand rows in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

GAP = 1
"""Columns of the terminal between two columns of the table."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        width: in columns of the terminal; the minimum for a column that may become wider.
        wish: the width that it gets before another one gets the rest.
        takes_rest: it takes the remaining width; without such a column, the first left-aligned one does.
        rank: on a narrow terminal, the column with the highest rank is omitted first; the one with rank 0 stays.
        write: formats a value.
        is_right: whether values are right-aligned, as numbers are.
        is_falling: whether sorting by this column puts the largest value first.
    """

    title: str
    width: int
    rank: int
    write: Callable[[Any], str] = str
    is_right: bool = True
    is_falling: bool = True
    wish: int = 0
    takes_rest: bool = False


@dataclass(frozen=True)
class Table:
    """Rows as columns.

    Attributes:
        columns: by key, in the order in which they are drawn.
        values: by key, a value for each row; None and NaN mean no value.
        names: identify the rows across refreshes.
        texts: of the rows, to which a filter applies.
        parents: the parent of each row in the tree, -1 for none; empty without a tree.
        styles: of highlighted rows.
        detail: returns the text on a row for the details line.
    """

    columns: dict[str, Column]
    values: dict[str, Sequence[Any]]
    names: Sequence[Hashable]
    texts: Sequence[str]
    detail: Callable[[int], str]
    parents: Sequence[int] = ()
    styles: dict[int, str] = field(default_factory=dict)

    def cell(self, row: int, key: str) -> str:
        """Format a value; `-` if there is none."""
        value = self.values[key][row]
        return "-" if value is None or value != value else self.columns[key].write(value)  # noqa: PLR0124  NaN


def fitting(columns: dict[str, Column], width: int) -> dict[str, int]:
    """Return the columns that fit into a terminal, with their widths.

    Returns:
        Widths by key, in the same order.
    """
    shown = list(columns)
    while len(shown) > 1 and _needed(columns, shown) > width:
        shown.remove(max(shown, key=lambda key: columns[key].rank))
    widths = {key: columns[key].width for key in shown}
    rest = width - _needed(columns, shown)
    for key in shown:
        more = max(0, min(rest, columns[key].wish - widths[key]))
        widths[key], rest = widths[key] + more, rest - more
    left_aligned = [key for key in shown if not columns[key].is_right]
    widest = next((key for key in shown if columns[key].takes_rest), (left_aligned or shown)[0])
    widths[widest] = max(1, widths[widest] + rest)
    return widths


def _needed(columns: dict[str, Column], shown: Sequence[str]) -> int:
    return sum(columns[key].width for key in shown) + GAP * (len(shown) - 1)
