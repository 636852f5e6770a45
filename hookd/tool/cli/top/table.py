"""A table whose columns are lists: what a view sorts, filters and draws. Ten thousand rows are sorted in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

GAP = 1
"""Columns of the terminal between two of the table."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head.
        width: columns of the terminal; of the first one, which has what the others leave, the least.
        rank: the highest goes first where the terminal is narrow; 0 stays.
        write: writes a value for a person.
        is_right: numbers stand at the right.
        is_falling: sorted by it, the largest comes first.
    """

    title: str
    width: int
    rank: int
    write: Callable[[Any], str] = str
    is_right: bool = True
    is_falling: bool = True


@dataclass(frozen=True)
class Table:
    """Rows as columns.

    Attributes:
        columns: by key, in the order in which they are drawn.
        values: for each key a value for each row; a float NaN is none.
        names: by which a row is known from one refresh to the next.
        texts: what a filter looks at.
        parents: the row above each in the tree, -1 for none; empty where there is no tree.
        styles: of rows that stand out.
        detail: says about a row what has no column.
    """

    columns: dict[str, Column]
    values: dict[str, Sequence[Any]]
    names: Sequence[Hashable]
    texts: Sequence[str]
    detail: Callable[[int], str]
    parents: Sequence[int] = ()
    styles: dict[int, str] = field(default_factory=dict)

    def cell(self, row: int, key: str) -> str:
        """Write a value; `-` for none."""
        value = self.values[key][row]
        return "-" if value is None or value != value else self.columns[key].write(value)  # noqa: PLR0124  NaN


def fitting(columns: dict[str, Column], width: int) -> dict[str, int]:
    """Choose the columns that a terminal has room for, with their widths.

    Returns:
        By key, in the same order. The first one that has no `is_right` takes what is left.
    """
    kept = list(columns)
    while len(kept) > 1 and _needed(columns, kept) > width:
        kept.remove(max(kept, key=lambda key: columns[key].rank))
    widths = {key: columns[key].width for key in kept}
    widest = next((key for key in kept if not columns[key].is_right), kept[0])
    widths[widest] = max(1, widths[widest] + width - _needed(columns, kept))
    return widths


def _needed(columns: dict[str, Column], kept: Sequence[str]) -> int:
    return sum(columns[key].width for key in kept) + GAP * (len(kept) - 1)
