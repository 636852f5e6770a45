"""The screen of `hookd top` on a pseudo-terminal: its input and output there, and the state in which it leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import sys
import termios
import threading

import pytest

from hookd.tool.cli.top import app as top
from hookd.tool.cli.top import terminal as terminals
from hookd.tool.cli.top.state import State
from hookd.tool.cli.top.terminal import is_dumb
from tests.support.processes import PATIENCE_S
from tests.support.top import Job, Still, Unclocked


class Terminal:
    """Both ends of a pseudo-terminal; the inner one stands where the process has its stdin and stdout."""

    def __init__(self, stack):
        self.outer, inner = pty.openpty()
        self.file = stack.enter_context(os.fdopen(inner, "r+b", buffering=0))
        stack.callback(self.hang_up)
        os.set_blocking(self.outer, False)
        termios.tcsetwinsize(self.outer, (24, 80))
        self.encoding = "utf-8"
        self._written = b""

    def fileno(self):
        return self.file.fileno()

    def isatty(self):
        return True

    def mode(self):
        return termios.tcgetattr(self.file.fileno())

    def type(self, data):
        os.write(self.outer, data)

    def written(self):
        """Return all that was written since `forget`."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.outer, 1 << 16):
                self._written += part
        return self._written.decode(errors="replace")

    def forget(self):
        self.written()
        self._written = b""

    def hang_up(self):
        if self.outer >= 0:
            os.close(self.outer)
        self.outer = -1


@pytest.fixture
def terminal(stack, monkeypatch):
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):  # textual's handlers stay
        stack.callback(signal.signal, number, signal.getsignal(number))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    opened = Terminal(stack)
    monkeypatch.setattr(sys, "__stdin__", opened)
    monkeypatch.setattr(sys, "__stdout__", opened)
    return opened


class Watched(Unclocked):
    """An app that gives its screen to a person at the terminal, and ends with that one's story."""

    def __init__(self, state, terminal, story):
        super().__init__(state)
        self._terminal, self._story = terminal, story

    def on_ready(self):
        self.run_worker(self._lived(), exit_on_error=True)

    async def _lived(self):
        await self._story(self)
        if self._terminal.outer >= 0:
            await self.until(
                lambda: self.is_quiet
            )  # the end waits for all that is to be written, and nobody reads then
        self.exit()

    async def until(self, condition):
        """Wait for a condition; the tests run one at a time, so nothing else wants the processor."""

        async def polled():
            while not condition():  # noqa: ASYNC110  bytes at the other end of a terminal set no event
                self._terminal.written()  # a line that takes nothing keeps the app from ending
                await asyncio.sleep(0)

        await asyncio.wait_for(polled(), PATIENCE_S)

    async def settled(self):
        """Wait until all that is to be drawn now has arrived at the terminal."""
        for _ in range(3):  # a refresh may ask for another one, as a change of the layout does
            drawn = asyncio.Event()
            self.call_after_refresh(drawn.set)
            await asyncio.wait_for(drawn.wait(), PATIENCE_S)
        await self.until(lambda: self.is_quiet)

    @property
    def is_quiet(self):
        return not self._driver.is_behind


@pytest.fixture
def state(stack):
    job = Job(stack)
    state = State(Still(job), 1.0)
    state.refresh(1.0)
    state.enter()
    return state


def lived(state, terminal, story):
    app = Watched(state, terminal, story)
    asyncio.run(app.run_async())
    if app._exception is not None:
        raise app._exception
    return app


def test_the_terminal_is_given_back_as_it_was(terminal, state):
    before = terminal.mode()

    async def story(app):
        assert not terminal.mode()[3] & (termios.ECHO | termios.ICANON)
        assert "\x1b[?1049h" in terminal.written()
        raise ZeroDivisionError

    with pytest.raises(Exception, match="ZeroDivisionError"):
        lived(state, terminal, story)
    assert terminal.mode() == before
    ending = terminal.written().rpartition("\x1b[?1049h")[2]
    for leave in ("\x1b[?7h", "\x1b[?25h", "\x1b[?1049l", "\x1b[?1000l", "\x1b[?1003l", "\x1b[?2004l", "\x1b[?1004l"):
        assert leave in ending
    assert "ZeroDivisionError" not in ending  # whoever has called `run` says so


def test_nothing_is_asked_whose_answer_the_shell_would_get_and_the_mouse_tells_of_clicks_only(terminal, state):
    async def story(app):
        await app.until(lambda: app._table.region.y == 3 and app.is_quiet)
        terminal.type(b"\x1b[<0;3;7M\x1b[<0;3;7m")  # a click, without a move before it
        await app.until(lambda: state.view.at == 2)

    lived(state, terminal, story)
    seen = terminal.written()
    for refused in ("$p", "\x1b[>", "\x1b]", "\x1b[c", "\x1b[6n", "\x1b[?1003h", "\x1b[?1004h", "\x1b[?1016h"):
        assert refused not in seen


def test_a_sigcont_while_it_ends_does_not_take_the_terminal_again(terminal, state, monkeypatch):
    """The kernel sends one with the SIGHUP of a terminal that is closed."""
    before = terminal.mode()

    async def story(app):
        await app.until(lambda: " tree" in terminal.written())
        close = app._driver.close

        def continued():
            os.kill(os.getpid(), signal.SIGCONT)
            close()

        monkeypatch.setattr(app._driver, "close", continued)

    lived(state, terminal, story)
    assert terminal.mode() == before
    assert "\x1b[?1049h" not in terminal.written().partition("\x1b[?1049l")[2]


def test_bytes_that_are_no_keys_do_no_harm(terminal, state):
    async def story(app):
        # Not UTF-8; Ctrl-Up, a sequence of nobody's, Alt-x, NUL, Ctrl-A; an arrow in two parts; a key.
        terminal.type(b"\xff\xfe\xc3\x1b[1;5A\x1b[99;99~\x1bx\x00\x01\x1b[")
        terminal.type(b"Bt")
        await app.until(lambda: state.view.is_tree)
        assert state.view.at == 1

    lived(state, terminal, story)


def test_a_paste_and_keys_in_one_piece_are_taken_in_their_order(terminal, state):
    async def story(app):
        terminal.type(b"hxh\x1b[Bhhhh")  # the help, and a key that leaves it, four times
        terminal.type("/é宽\x7f\x7fattn\rt\x1b[B\x1b[B".encode())
        await app.until(lambda: state.view.at == 2)
        assert (state.view.pattern, state.view.is_tree) == ("attn", True)
        terminal.type(b"/\x1b[200~.0\nt\x1b[201~")
        await app.until(lambda: state.view.pattern == "attn.0")

    lived(state, terminal, story)


def test_only_the_lines_that_changed_are_written(terminal, state):
    async def story(app):
        terminal.type(b"\x1b[B")
        await app.until(lambda: "blocks: Linear" in terminal.written())
        await app.settled()
        terminal.forget()
        terminal.type(b"\x1b[B")
        await app.until(lambda: "blocks.0: Linear" in terminal.written())
        await app.settled()
        assert 160 < len(terminal.written()) < 600  # two rows and the details
        terminal.forget()
        app.show()
        state.pace = lambda: "another pace"
        app.show()
        await app.until(lambda: "another pace" in terminal.written())
        await app.settled()
        assert 80 < len(terminal.written()) < 200

    lived(state, terminal, story)


def test_a_line_that_takes_nothing_is_not_drawn_for(terminal, state, stack, monkeypatch):
    write, takes = terminals.Output.write, threading.Event()
    takes.set()
    stack.callback(takes.set)
    monkeypatch.setattr(terminals.Output, "write", lambda output, text: takes.wait(PATIENCE_S) and write(output, text))

    async def story(app):
        await app.settled()
        takes.clear()
        app.refresh()
        await app.until(lambda: not app.is_quiet)
        seen = state.opened.read_at
        app.read()
        assert state.opened.read_at == seen
        takes.set()
        await app.until(lambda: app.is_quiet)
        app.read()
        assert state.opened.read_at > seen

    lived(state, terminal, story)


def test_a_line_that_takes_nothing_does_not_keep_it_from_ending(terminal, state, stack, monkeypatch):
    takes = threading.Event()
    stack.callback(takes.set)
    monkeypatch.setattr(terminals, "EXIT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(terminals.Output, "write", lambda _, text: takes.wait() and len(text))

    async def story(app):
        app.exit()
        await asyncio.Event().wait()  # the end cancels this: nothing of what is still to be written is waited for

    app = Watched(state, terminal, story)
    asyncio.run(app.run_async())
    assert app._driver._writer_thread.is_alive()


@pytest.mark.parametrize("no_color", ["1", ""])
def test_there_is_no_colour_where_none_is_wanted(terminal, state, monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    top.obey_no_color()
    table = state.view.table
    table.styles.update({1: "bold red", 2: "red"})

    async def story(app):
        await app.until(lambda: " tree" in terminal.written())

    lived(state, terminal, story)
    seen = terminal.written()
    assert "\x1b[7" in seen
    assert ("\x1b[31" in seen or ";31" in seen) == (no_color == "")


def test_what_the_terminal_cannot_write_becomes_a_question_mark(terminal, state):
    terminal.encoding = "ascii"

    async def story(app):
        state.detail = lambda: "3 µs…"
        app.show()
        await app.until(lambda: "3 ?s?" in terminal.written())

    lived(state, terminal, story)


def test_a_terminal_that_is_gone_ends_it(terminal, state, monkeypatch):
    monkeypatch.setattr(top, "HANGUP_S", 0.01)

    async def story(app):
        terminal.hang_up()
        await asyncio.Event().wait()

    lived(state, terminal, story)


@pytest.mark.parametrize(("term", "dumb"), [("dumb", True), ("", True), ("linux", False), ("screen", False)])
def test_a_terminal_that_cannot_move_its_cursor_is_known(monkeypatch, term, dumb):
    monkeypatch.setenv("TERM", term)
    assert is_dumb() == dumb
