"""Keys as terminals send them, and what is written to one: a pseudo-terminal is the screen."""

from __future__ import annotations

import contextlib
import os
import pty
import termios

import pytest
from rich.text import Text

from hookd.tool.cli.top.keys import Keys
from hookd.tool.cli.top.screen import Screen, is_dumb


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"qI/", ["q", "I", "/"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (
            b"\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[1~\x1b[4~\x1bOH",
            ["pageup", "pagedown", "home", "end", "home", "end", "home"],
        ),
        (b"\x1b[17~\x1bOP\x1b[[A\x1b[[E\x1b[21~", ["f6", "f1", "f1", "f5", "f10"]),
        (b"\r\n\x7f\x08\t", ["enter", "enter", "backspace", "backspace", "tab"]),
        ("é宽".encode(), ["é", "宽"]),
        (b"\x1b[1;5A\x1b[200~x\x1b[<0;1;1M", ["x"]),  # Ctrl-Up, a paste, a mouse: unknown, and no letters of theirs
        (b"\x1bx\x00\x01a", ["a"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
        (b"\xff\xfe", ["\ufffd", "\ufffd"]),
    ],
)
def test_keys_are_told_apart(data, keys):
    assert Keys().feed(data) == keys
    torn = Keys()
    assert [key for byte in data for key in torn.feed(bytes([byte]))] == keys


def test_an_escape_alone_is_a_key_when_nothing_follows():
    keys = Keys()
    assert keys.feed(b"\x1b") == []
    assert keys.is_waiting
    assert keys.flush() == ["escape"]
    assert not keys.is_waiting
    assert keys.feed(b"\x1b[1;") == []
    assert keys.flush() == []
    assert keys.feed(b"a") == ["a"]


def test_a_sequence_without_end_is_dropped():
    keys = Keys()
    keys.feed(b"\x1b[" + b"0" * 1000)
    assert len(keys._text) < 64 or keys.feed(b"q")[-1] == "q"


class Terminal:
    """Both ends of a pseudo-terminal; the inner one stands where the process has its stdin and stdout."""

    def __init__(self, stack):
        self.outer, inner = pty.openpty()
        self.file = stack.enter_context(os.fdopen(inner, "r+b", buffering=0))
        stack.callback(os.close, self.outer)
        os.set_blocking(self.outer, False)
        self.encoding = "utf-8"

    def fileno(self):
        return self.file.fileno()

    def mode(self):
        return termios.tcgetattr(self.file.fileno())

    def written(self):
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.outer, 1 << 16):
                data += part
        return data.decode()


@pytest.fixture
def terminal(stack, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal(stack)


def test_the_terminal_is_given_back_as_it_was(terminal):
    before = terminal.mode()
    with contextlib.suppress(ZeroDivisionError), Screen(terminal, terminal) as screen:
        assert not terminal.mode()[3] & (termios.ECHO | termios.ICANON)
        assert terminal.mode()[3] & termios.ISIG
        screen.draw([Text("x" * 80)] * 24)
        raise ZeroDivisionError
    assert terminal.mode() == before
    assert terminal.written().endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")
    screen.leave()
    assert terminal.written() == ""


def test_only_the_lines_that_changed_are_written(terminal):
    with Screen(terminal, terminal) as screen:
        lines = [Text(f"line {number}".ljust(80)) for number in range(24)]
        assert screen.draw(lines) > 24 * 80
        terminal.written()
        assert screen.draw([line.copy() for line in lines]) == 0
        lines[7] = Text("other".ljust(80), style="red")
        assert 80 < screen.draw(lines) < 110
        assert terminal.written().startswith("\x1b[8;1H\x1b[31mother")
        screen.forget()
        assert screen.draw(lines) > 24 * 80
        assert screen.draw(lines[:10]) > 800


def test_there_is_no_colour_where_none_is_wanted(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    with Screen(terminal, terminal) as screen:
        terminal.written()
        screen.draw([Text("hangs", style="bold red"), Text("chosen", style="reverse")])
        text = terminal.written()
    assert "\x1b[1mhangs" in text
    assert "\x1b[7mchosen" in text


def test_what_the_terminal_cannot_write_becomes_a_question_mark(terminal):
    terminal.encoding = "ascii"
    with Screen(terminal, terminal) as screen:
        screen.draw([Text("3 µs…")])
    assert "3 ?s?" in terminal.written()


@pytest.mark.parametrize(("term", "dumb"), [("dumb", True), ("", True), ("linux", False), ("screen", False)])
def test_a_terminal_that_cannot_move_its_cursor_is_known(monkeypatch, term, dumb):
    monkeypatch.setenv("TERM", term)
    assert is_dumb() == dumb
