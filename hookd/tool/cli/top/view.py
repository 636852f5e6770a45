"""The view of a table: its order, filter and cursor. This module does not depend on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hookd.tool.cli.top.table import Table

INDENT = 2


class View:
    """A sorted and filtered table with a cursor, which stays on its row when rows change their order.

    Args:
        table: the table; `show` replaces it with a newer one.
        key: the column by which it is sorted.

    Attributes:
        order: the rows, in the order in which they are drawn.
        depths: depth of the rows in the tree, by row.
        pattern: the filter; empty for none.
    """

    def __init__(self, table: Table, key: str) -> None:
        self.table = table
        self.key = key
        self.is_inverted = False
        self.is_tree = False
        self.pattern = ""
        self.order: list[int] = []
        self.depths: dict[int, int] = {}
        self.top = 0
        self._at = 0
        self._name: Hashable = None
        self.show(table)

    def show(self, table: Table) -> None:
        """Replace the table with a newer one, or apply changed settings to it."""
        self.table = table
        if self.key not in table.columns:
            self.key = next(iter(table.columns))
        self.depths = {}
        rows = self._matching()
        self.order = self._as_tree(rows) if self.is_tree and table.parents else self._sorted(rows)
        self._stay()

    def _matching(self) -> Sequence[int]:
        count = len(self.table.names)
        if not self.pattern:
            return range(count)
        pattern = self.pattern.lower()
        return [row for row, text in enumerate(self.table.texts) if pattern in text]

    def _sorted(self, rows: Sequence[int]) -> list[int]:
        """Return the rows sorted by the column, stably; rows without a value come last."""
        values = self.table.values[self.key]
        with_value = [row for row in rows if values[row] == values[row] and values[row] not in (None, "")]  # noqa: PLR0124
        is_falling = self.table.columns[self.key].is_falling != self.is_inverted
        if {type(values[row]) for row in with_value} <= {int, float}:
            with_value.sort(key=values.__getitem__, reverse=is_falling)
        else:
            with_value.sort(key=lambda row: _natural(values[row]), reverse=is_falling)
        if len(with_value) == len(rows):
            return with_value
        sorted_rows = set(with_value)
        return with_value + [row for row in rows if row not in sorted_rows]

    def _as_tree(self, rows: Sequence[int]) -> list[int]:
        """Return the rows as a tree with sorted siblings, and set `depths`; parents of filtered rows are added."""
        parents = self.table.parents
        shown = set(rows)
        for row in rows:
            above = parents[row]
            while above >= 0 and above not in shown:
                shown.add(above)
                above = parents[above]
        children: dict[int, list[int]] = {}
        for row in self._sorted(sorted(shown)):
            children.setdefault(parents[row], []).append(row)
        order, left = [], [(row, 0) for row in reversed(children.get(-1, []))]
        while left:
            row, depth = left.pop()
            self.depths[row] = depth
            order.append(row)
            left.extend((child, depth + 1) for child in reversed(children.get(row, [])))
        return order

    def _stay(self) -> None:
        """Move the cursor to its row's new line; if the row is gone, the cursor keeps its line."""
        if self._name is not None:
            names = self.table.names
            self._at = next((at for at, row in enumerate(self.order) if names[row] == self._name), self._at)
        self._at = max(0, min(self._at, len(self.order) - 1))

    @property
    def row(self) -> int | None:
        """The row at the cursor, None in an empty table."""
        return self.order[self._at] if self.order else None

    @property
    def at(self) -> int:
        """The line of the cursor, from 0 for the first row."""
        return self._at

    def move(self, by: int) -> None:
        """Move the cursor by a number of lines, within the table."""
        self._at = max(0, min(self._at + by, len(self.order) - 1))
        self._name = self.table.names[self.order[self._at]] if self.order and self._at else None

    def visible(self, height: int) -> list[int]:
        """Return the rows of a window of `height` lines, scrolled so that it contains the cursor."""
        self.top = max(min(self.top, self._at), self._at - height + 1, 0)
        self.top = max(0, min(self.top, len(self.order) - height))
        return self.order[self.top : self.top + height]

    def sort_next(self, by: int, among: Sequence[str]) -> None:
        """Sort by the column `by` places to the right of the current one in `among`, the columns that are drawn."""
        at = among.index(self.key) if self.key in among else 0
        self.key = among[(at + by) % len(among)]
        self.is_inverted = False
        self.show(self.table)

    def name_of(self, row: int) -> str:
        """Return the indentation of a row's name in the tree."""
        return " " * (INDENT * self.depths.get(row, 0))


def _natural(value: Any) -> tuple[Any, ...]:
    """Return a sort key that puts numbers before words, and `layers.10` after `layers.9`."""
    parts = str(value).split(".")
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 18 else (1, 0, part) for part in parts)
