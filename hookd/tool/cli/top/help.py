"""The help of `hookd top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from textual.app import ComposeResult

HELP = """\
Up Down PageUp PageDown Home End   move; so does the mouse wheel
Enter           open: from all targets to the modules of one; double-click too
Esc Backspace   go back; a filter is cleared first
<  >  o  F6     sort by the column to the left, to the right, the next one
                click on a title: sort by it, click again: invert
I               invert the order
/  F4           show only rows with a text: Enter keeps it, Esc clears it
t  F5           show modules as a tree
Left Right      tree: hide or show the submodules; Enter and double-click too
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

Press any key to go back.
"""

SCROLLING = {
    "up": "scroll_up", "down": "scroll_down", "pageup": "scroll_page_up", "pagedown": "scroll_page_down",
    "home": "scroll_home", "end": "scroll_end",
}  # fmt: skip
"""Keys that scroll a help that does not fit, and textual's methods for it."""


class Help(ModalScreen[None]):
    """The keys and columns, until a click, or a key of the app."""

    CSS = "Help { overflow: hidden auto; } Help > Static { width: 100%; }"

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield Static(HELP, markup=False)

    def scroll_by_key(self, key: str) -> bool:
        """Scroll if a key does that and the screen is too small for the help; return whether it was so."""
        if not self.max_scroll_y or key not in SCROLLING:
            return False
        getattr(self, SCROLLING[key])(animate=False)
        return True

    def on_click(self) -> None:
        """Go back."""
        if self.is_current:
            self.dismiss()
