"""The view of a table: its order, filter and cursor. This module does not depend on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.tool.cli import options

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
        hidden: number of rows that a folded row hides, by row.
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
        self.hidden: dict[int, int] = {}
        self.top = 0
        self._folded: set[Hashable] = set()
        self._at = 0
        self._name: Hashable = None
        self.show(table)

    def show(self, table: Table) -> None:
        """Replace the table with a newer one, or apply changed settings to it."""
        self.table = table
        if self.key not in table.columns:
            self.key = next(iter(table.columns))
        self.depths, self.hidden = {}, {}
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
        folded = set() if self.pattern else self._folded  # a filter shows what it finds
        while left:
            row, depth = left.pop()
            self.depths[row] = depth
            order.append(row)
            if folded and row in children and self.table.names[row] in folded:
                self.hidden[row] = _descendants(row, children)
            else:
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
        self.key, self.is_inverted = among[(at + by) % len(among)], False
        self.show(self.table)

    def sort_by(self, key: str) -> None:
        """Sort by a column, or invert the order if it is sorted by that one."""
        self.is_inverted = key == self.key and not self.is_inverted
        self.key = key
        self.show(self.table)

    def invert(self) -> None:
        """Invert the order."""
        self.is_inverted = not self.is_inverted
        self.show(self.table)

    def turn_tree(self) -> None:
        """Switch between the tree and the list."""
        self.is_tree = not self.is_tree
        self.show(self.table)

    def filter(self, pattern: str) -> None:
        """Show only rows that contain a text, in any case; all if it is empty."""
        self.pattern = pattern
        self.show(self.table)

    def fold(self) -> None:
        """Hide what is below the row at the cursor; if there is nothing to hide, move to its parent."""
        row = self.row
        if row is None or not self.depths:
            return
        if self._has_children(row) and not self.pattern:
            self._folded.add(self.table.names[row])
        elif self.table.parents[row] >= 0:
            self.move(self.order.index(self.table.parents[row]) - self._at)
        self.show(self.table)

    def unfold(self) -> None:
        """Show what is below the row at the cursor."""
        if self.row is not None:
            self._folded.discard(self.table.names[self.row])
            self.show(self.table)

    def turn_fold(self) -> None:
        """Show what is below the row at the cursor if it is hidden, else hide it."""
        if self.row in self.hidden:
            self.unfold()
        elif self.row is not None and self._has_children(self.row):
            self.fold()

    def _has_children(self, row: int) -> bool:
        """Whether rows below a row of the tree are shown: the first one then follows it."""
        at = self.order.index(row) + 1
        return bool(self.depths) and at < len(self.order) and self.table.parents[self.order[at]] == row

    def text(self, row: int, key: str) -> str:
        """Return the text of a cell. In the tree the first column has only the last part of a name, indented."""
        text = self.table.cell(row, key)
        if not self.depths or key != next(iter(self.table.columns)):
            return text
        depth = self.depths.get(row, 0)
        hidden = f" +{self.hidden[row]}" if row in self.hidden else ""
        return " " * (INDENT * depth) + (text.rpartition(".")[2] if depth else text) + hidden


def _descendants(row: int, children: dict[int, list[int]]) -> int:
    count, left = 0, [row]
    while left:
        below = children.get(left.pop(), [])
        count += len(below)
        left += below
    return count


def _natural(value: Any) -> tuple[Any, ...]:
    """Return a sort key that puts numbers before words, and `layers.10` after `layers.9`."""
    parts = str(value).split(".")
    numbers = map(options.number, parts)
    return tuple(
        (1, 0, part) if number is None else (0, number, "") for part, number in zip(parts, numbers, strict=True)
    )
