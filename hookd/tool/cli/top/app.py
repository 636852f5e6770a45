"""The screen of `hookd top`: its keys, its mouse and its clock."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from hookd.tool.cli.top.lines import KeyLine, Line
from hookd.tool.cli.top.table_view import TableView
from hookd.tool.cli.top.terminal import Driver

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult
    from textual.timer import Timer

    from hookd.tool.cli.top.state import State

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FIRST_S = 0.5
"""Time until the second reading, before which there are no rates."""
HANGUP_S = 1.0
"""Interval at which a closed terminal is noticed that has sent no SIGHUP."""
FAR = 1 << 30
KEYS = (
    ("q quit", "app.end(0)"), ("Enter open", "app.open"), ("Esc back", "app.back"), ("/ filter", "app.filter"),
    ("<", "app.sort(-1)"), ("> sort", "app.sort(1)"), ("I invert", "app.view('invert')"), ("t tree", "app.view('turn_tree')"),
    ("h help", "app.help"),
)  # fmt: skip
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


def run(state: State) -> int:
    """Show the state until the user quits or a signal ends it.

    Returns:
        The exit status: 0, or 128 plus the number of the signal.
    """
    if not os.environ.get("NO_COLOR"):
        os.environ.pop("NO_COLOR", None)  # textual also obeys an empty one
    app = TopApp(state)
    asyncio.run(_run(app))
    if app._exception is not None:
        raise app._exception
    return app.return_code or 0


async def _run(app: TopApp) -> None:
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, app.action_end, 128 + number)
    await app.run_async()


class Help(ModalScreen[None]):
    """The keys and columns, until a key or a click."""

    CSS = "Help { overflow-y: auto; } Help > Static { width: auto; }"

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield Static(HELP, markup=False)

    def on_key(self, event: events.Key) -> None:
        """Go back, or quit."""
        if event.key in ("q", "f10"):
            self.app.exit()
        else:
            self.dismiss()

    def on_click(self) -> None:
        """Go back."""
        self.dismiss()


class TopApp(App[None]):
    """Shows a state, and refreshes it.

    Args:
        state: what is shown.
    """

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    AUTO_FOCUS = None
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #filter { height: 1; display: none; }
    #filter Static { width: auto; }
    #filter Input, #filter Input:focus { width: 1fr; height: 1; border: none; padding: 0; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "end(130)", priority=True),
        Binding("ctrl+backslash", "end(131)", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
        Binding("q,f10", "end(0)"),
        Binding("enter", "open"),
        Binding("escape,backspace", "back"),
        Binding("<", "sort(-1)"),
        Binding(">,o,f6", "sort(1)"),
        Binding("I", "view('invert')"),
        Binding("t,f5", "view('turn_tree')"),
        Binding("left", "view('fold')"),
        Binding("right", "view('unfold')"),
        Binding("p", "pause"),
        Binding("/,f4", "filter"),
        Binding("h,?,f1", "help"),
        Binding("+", "interval(1)"),
        Binding("-", "interval(-1)"),
        Binding("up", "view('move', -1)"),
        Binding("down", "view('move', 1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("home", f"view('move', {-FAR})"),
        Binding("end", f"view('move', {FAR})"),
    ]

    def __init__(self, state: State) -> None:
        super().__init__(driver_class=Driver, ansi_color=True)
        self.state = state
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        """Yield the lines of the screen, from top to bottom."""
        yield Line("reverse", id="title")
        yield Line(id="progress")
        yield Line(id="phases")
        yield TableView(self.state.view)
        yield Line("dim", id="detail")
        with Horizontal(id="filter"):
            yield Static("filter: ")
            yield Input(placeholder="Enter keeps it, Esc clears it", compact=True, select_on_focus=False)
        yield KeyLine(KEYS)

    def on_mount(self) -> None:
        """Draw the first reading, and take the second one soon."""
        self.query_one(Input).cursor_blink = False  # each blink would be written to the line
        self.set_interval(HANGUP_S, self._watch_terminal)
        self.show()
        self._read_in(FIRST_S)

    def show(self) -> None:
        """Draw the state."""
        state = self.state
        self.query_one("#title", Line).show(state.title(), state.pace())
        for name, text in (("#progress", state.progress()), ("#phases", state.phases())):
            line = self.query_one(name, Line)
            line.display = state.opened is not None
            line.show(text)
        self.query_one(TableView).show(state.view)
        self.query_one("#detail", Line).show(state.detail())
        typed = self.query_one(Input)
        typed.value = state.view.pattern
        self.query_one("#filter").display = typed.has_focus or bool(typed.value)

    # The clock

    def _read_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(min(seconds, self.state.interval_s), self.read)

    def read(self) -> None:
        """Read the targets and draw them, unless that is paused or the line has not taken the last drawing."""
        if self.state.is_paused:
            return
        if not (isinstance(self._driver, Driver) and self._driver.is_behind):
            self.state.refresh(time.monotonic())
            self.show()
        self._read_in(self.state.interval_s)

    def _watch_terminal(self) -> None:
        if isinstance(self._driver, Driver) and self._driver.is_gone:
            self.exit()

    def _fatal_error(self) -> None:
        """End. `run` raises the error when the terminal is restored; textual would print all variables."""
        self._close_messages_no_wait()

    # Keys

    def action_end(self, code: int) -> None:
        """Quit with an exit code."""
        self.exit(return_code=code)

    def action_open(self) -> None:
        """Open the row at the cursor."""
        if self.state.open():
            self._read_in(FIRST_S)
        self.show()

    def action_back(self) -> None:
        """Clear the filter, or go back."""
        typed = self.query_one(Input)
        if typed.has_focus:
            self.set_focus(None)
            self.state.view.filter("")
        else:
            self.state.back()
        self.show()

    def action_sort(self, by: int) -> None:
        """Sort by another column of those that are drawn."""
        self.state.view.sort_next(by, list(self.query_one(TableView).widths))
        self.show()

    def action_view(self, change: str, *arguments: int) -> None:
        """Call a method of the view that is shown."""
        getattr(self.state.view, change)(*arguments)
        self.show()

    def action_pause(self) -> None:
        """Stop reading, or read again, at once."""
        self.state.is_paused = not self.state.is_paused
        self.read()
        self.show()

    def action_filter(self) -> None:
        """Let the user type a filter."""
        self.query_one("#filter").display = True
        self.query_one(Input).focus()

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help())

    def action_interval(self, by: int) -> None:
        """Take a longer or a shorter interval."""
        self.state.change_interval(by)
        self._read_in(self.state.interval_s)
        self.show()

    def action_page(self, by: int) -> None:
        """Move the cursor by the height of the table."""
        self.action_view("move", by * max(1, self.query_one(TableView).size.height - 3))

    # Messages of the widgets

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the text is typed."""
        if event.value != self.state.view.pattern:
            self.state.view.filter(event.value)
            self.show()

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self.set_focus(None)
        self.show()

    def on_table_view_changed(self) -> None:
        """Draw what the mouse has changed."""
        self.set_focus(None)
        self.show()

    def on_table_view_opened(self) -> None:
        """Open a row that was clicked twice."""
        self.set_focus(None)
        self.action_open()
