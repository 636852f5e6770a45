"""The table on the screen: only rows in sight are formatted, and only lines that differ are drawn again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from hookd.tool.cli.top.cells import fit
from hookd.tool.cli.top.table import GAP, fitting

if TYPE_CHECKING:
    from textual import events

    from hookd.tool.cli.top.view import View

HEAD, SORTED, CURSOR = "bold", "bold reverse", "reverse"
WHEEL = 3
"""Rows by which one notch of the wheel moves."""


class TableView(Widget):
    """A view of a table, below its titles.

    Attributes:
        view: what is drawn.
        widths: the columns that are drawn, with their widths.
    """

    DEFAULT_CSS = "TableView { height: 1fr; }"

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view = view
        self.widths: dict[str, int] = {}
        self._lines: list[list[Segment]] = []
        self._formatted = Size(0, 0)

    def show(self, view: View) -> None:
        """Draw a view, or the changes in it."""
        self.view = view
        before = self._lines
        self._format()
        changed = [at for at, line in enumerate(self._lines) if at >= len(before) or before[at] != line]
        if changed:
            self.refresh(*(Region(0, at, self.size.width, 1) for at in changed))

    def _format(self) -> None:
        width, height = self._formatted = self.size
        self.widths = fitting(self.view.table.columns, width)
        rows = self.view.visible(height - 1) if height > 1 else []
        lines = [self._head(), *map(self._row, rows)]
        self._lines = lines[:height] + [[]] * (height - len(lines))

    def _head(self) -> list[Segment]:
        titles: list[Segment] = []
        for key, width in self.widths.items():
            column = self.view.table.columns[key]
            titles += [Segment(" " * GAP)] if titles else []
            style = Style.parse(SORTED if key == self.view.key else HEAD)
            titles.append(Segment(fit(column.title, width, is_right=column.is_right), style))
        return titles

    def _row(self, row: int) -> list[Segment]:
        columns = self.view.table.columns
        cells = [
            fit(self.view.text(row, key), width, is_right=columns[key].is_right) for key, width in self.widths.items()
        ]
        style = CURSOR if row == self.view.row else self.view.table.styles.get(row, "")
        return [Segment((" " * GAP).join(cells), Style.parse(style))]

    def render_line(self, y: int) -> Strip:
        """Return a line of the table; after a resize, all are made anew before the first one is drawn."""
        if self._formatted != self.size:
            self._format()
        return Strip(self._lines[y])

    async def on_click(self, event: events.Click) -> None:
        """Sort by a title, or move the cursor to a row; open it at the second click."""
        if event.y == 0:
            await self.run_action(f"app.view('sort_by', '{self._column(event.x)}')")
        elif self.view.top + event.y <= len(self.view.order):
            await self.run_action(f"app.view('move', {self.view.top + event.y - 1 - self.view.at})")
            if event.chain == 2:
                await self.run_action("app.open")

    def _column(self, x: int) -> str:
        """Return the key of the column at `x`, whose gap belongs to the column on its left."""
        right = 0
        for key, width in self.widths.items():
            right += width + GAP
            if x < right:
                return key
        return key

    async def on_mouse_scroll_down(self) -> None:
        """Move the cursor down."""
        await self.run_action(f"app.view('move', {WHEEL})")

    async def on_mouse_scroll_up(self) -> None:
        """Move the cursor up."""
        await self.run_action(f"app.view('move', {-WHEEL})")
