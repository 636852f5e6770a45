"""Single lines of the screen. Their text may be a target's, so none of them reads markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from hookd.tool.cli.top.cells import fit

if TYPE_CHECKING:
    from collections.abc import Sequence


class Line(Widget):
    """A line of text, shortened at its end.

    Args:
        style: of the whole line, in rich's words.
        keeps_end: whether it is shortened in its middle instead.
        id: of the widget.
    """

    DEFAULT_CSS = "Line { height: 1; }"

    def __init__(self, style: str = "", *, keeps_end: bool = False, id: str | None = None) -> None:  # noqa: A002  textual's name
        super().__init__(id=id)
        self._style = Style.parse(style)
        self._keeps_end = keeps_end
        self._left = self._right = ""

    def show(self, left: str, right: str = "") -> None:
        """Draw a text, and another one at the right edge if it takes less than a third of the line."""
        if (left, right) != (self._left, self._right):
            self._left, self._right = left, right
            self.refresh()

    def render_line(self, y: int) -> Strip:  # noqa: ARG002  there is one
        """Return the line."""
        width = self.size.width
        right = f" {self._right}" if self._right and len(self._right) <= width // 3 else ""
        room = width - len(right)
        left = self._left
        if len(left) > room and not self._keeps_end:
            left = set_cell_size(left, max(0, room - 1)) + "…"
        return Strip([Segment(fit(left, room) + right, self._style)])


class KeyLine(Widget):
    """The most important keys; a click on one does the same.

    Args:
        keys: of each the key, what it does in words, and its action.
    """

    DEFAULT_CSS = "KeyLine { height: 1; }"

    def __init__(self, keys: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._segments = [
            Segment(text, Style(bold=is_key, meta={"@click": action}))
            for key, words, action in keys
            for text, is_key in ((key, True), (words, False))
        ]

    def render_line(self, y: int) -> Strip:  # noqa: ARG002  there is one
        """Return the line."""
        return Strip(self._segments)
