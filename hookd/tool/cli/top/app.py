"""The screen of `hookd top`: its keys, its mouse and its clock."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType

from hookd.tool.cli.top.cells import safe
from hookd.tool.cli.top.help import Help
from hookd.tool.cli.top.lines import KeyLine, Line
from hookd.tool.cli.top.table_view import TableView
from hookd.tool.cli.top.terminal import Driver

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.timer import Timer

    from hookd.tool.cli.top.state import State

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FIRST_S = 0.5
"""Time until the second reading, before which there are no rates."""
HANGUP_S = 1.0
"""Interval at which a closed terminal is noticed that has sent no SIGHUP."""
MOVES = {"up": -1, "down": 1, "home": -(1 << 30), "end": 1 << 30}
"""Keys that move the cursor, and by how many rows."""
ENDING_KEYS = ("ctrl+c", "ctrl+backslash", "ctrl+z")
"""Keys that do the same while a filter is typed."""
TYPING = "_   (Enter keeps it, Esc clears it)"
KEYS = (
    ("q", " quit  ", "app.end(0)"), ("Enter", " open  ", "app.open"), ("Esc", " back  ", "app.leave"),
    ("/", " filter  ", "app.filter"), ("<", " ", "app.sort(-1)"), (">", " sort  ", "app.sort(1)"),
    ("I", " invert  ", "app.view('invert')"), ("t", " tree  ", "app.view('turn_tree')"), ("h", " help", "app.help"),
)  # fmt: skip
"""The keys of the last line, what they do in words, and what a click on them does."""


def run(state: State) -> int:
    """Show the state until the user quits or a signal ends it.

    Returns:
        The exit status: 0, or 128 plus the number of the signal.
    """
    obey_no_color()
    app = TopApp(state)
    asyncio.run(_run(app))
    error = app._exception  # noqa: SLF001  textual has no other way to ask for it
    if error is not None:
        raise error
    return app.return_code or 0


def obey_no_color() -> None:
    """Remove an empty NO_COLOR from the environment: it means nothing, but textual obeys it."""
    if not os.environ.get("NO_COLOR"):
        os.environ.pop("NO_COLOR", None)


async def _run(app: TopApp) -> None:
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, app.action_end, 128 + number)
    await app.run_async()


class TopApp(App[None]):
    """Shows a state, and refreshes it.

    Args:
        state: what is shown.
    """

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    CSS = "Screen { background: ansi_default; color: ansi_default; overflow: hidden; }"
    # With priority, keys act in the order in which they were pressed, also where the focus moves in between.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(keys, action, priority=True)
        for keys, action in (
            ("q,f10", "end(0)"), ("ctrl+c", "end(130)"), ("ctrl+backslash", "end(131)"), ("ctrl+z", "suspend_process"),
            ("enter,ctrl+j", "open"), ("escape,backspace,ctrl+h", "leave"), ("/,f4", "filter"), ("h,?,f1", "help"),
            ("<", "sort(-1)"), (">,o,f6", "sort(1)"), ("I", "view('invert')"), ("t,f5", "view('turn_tree')"),
            ("left", "view('fold')"), ("right", "view('unfold')"), ("p", "pause"), ("+", "interval(1)"),
            ("-", "interval(-1)"), ("pageup", "page(-1)"), ("pagedown", "page(1)"),
            *((key, f"view('move', {by})") for key, by in MOVES.items()),
        )
    ]  # fmt: skip

    def __init__(self, state: State) -> None:
        super().__init__(driver_class=Driver, ansi_color=True)
        self.state = state
        self._is_typing = False
        self._timer: Timer | None = None
        self._title = Line("reverse", keeps_end=True)  # the end says the state
        self._progress, self._phases = Line(), Line()
        self._table = TableView(state.view)
        self._detail, self._filter = Line("dim"), Line()

    def compose(self) -> ComposeResult:
        """Yield the lines of the screen, from top to bottom."""
        yield from (self._title, self._progress, self._phases, self._table, self._detail, self._filter, KeyLine(KEYS))

    def on_mount(self) -> None:
        """Draw the first reading, and take the second one soon."""
        self.set_interval(HANGUP_S, self._watch_terminal)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh())  # the shell has used the terminal
        self.show()
        self._read_in(FIRST_S)

    def show(self) -> None:
        """Draw the state."""
        state = self.state
        self._title.show(state.title(), state.pace())
        self._progress.display = self._phases.display = state.opened is not None
        self._progress.show(state.progress())
        self._phases.show(state.phases())
        self._table.show(state.view)
        self._detail.show(state.detail())
        self._filter.display = self._is_typing or bool(state.view.pattern)
        self._filter.show(f"/{safe(state.view.pattern)}" + (TYPING if self._is_typing else ""))

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

    async def on_event(self, event: events.Event) -> None:
        """Take the keys of the help and of a filter at once: sent to a widget, the next key's action could overtake them."""
        if not isinstance(event, events.Key) or event.key in ENDING_KEYS:
            await super().on_event(event)
        elif isinstance(self.screen, Help) and event.key not in ("q", "f10"):
            if not self.screen.scroll_by_key(event.key):
                self.pop_screen()
        elif self._is_typing:
            self._type(event)
        else:
            await super().on_event(event)

    def _type(self, event: events.Key) -> None:
        view = self.state.view
        if event.key in ("enter", "ctrl+j", "escape"):
            self._is_typing = False
            view.filter("" if event.key == "escape" else view.pattern)
        elif event.key in ("backspace", "ctrl+h"):
            view.filter(view.pattern[:-1])
        elif event.is_printable and event.character:
            view.filter(view.pattern + event.character)
        elif event.key in MOVES:
            view.move(MOVES[event.key])
        self.show()

    def on_paste(self, event: events.Paste) -> None:
        """Take a pasted text as a part of the filter."""
        if self._is_typing:
            self.state.view.filter(self.state.view.pattern + event.text.partition("\n")[0])
            self.show()

    def action_open(self) -> None:
        """Open the row at the cursor."""
        if self.state.enter():
            self._read_in(FIRST_S)
        self.show()

    def action_leave(self) -> None:
        """Clear the filter, else go back."""
        self.state.back()
        self.show()

    def action_sort(self, by: int) -> None:
        """Sort by another column of those that are drawn."""
        self.state.view.sort_next(by, list(self._table.widths))
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
        """Start typing a filter."""
        self._is_typing = True
        self.show()

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
        self.action_view("move", by * max(1, self._table.size.height - 3))
