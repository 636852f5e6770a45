"""The main loop of `hookd top`: read, draw, and wait for a key, a signal or the next reading."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

from hookd.tool.cli.top.keys import Keys
from hookd.tool.cli.top.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.top.app import App

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ESCAPE_S = 0.05
"""How long to wait after an ESC for the rest of a key, which a slow connection may delay."""


def run(app: App) -> int:
    """Show the app until the user quits or a signal ends it.

    Returns:
        The exit status: 0, or 128 plus the number of the signal.
    """
    keys = Keys()
    with _signals() as signals, Screen(sys.stdin, sys.stdout) as screen:
        while not app.is_done:
            if not app.is_paused and time.monotonic() >= app.due:
                app.refresh(time.monotonic())
            screen.draw(app.lines(*screen.size()))
            for number in _wait(app, keys, signals):
                if number in ENDING:
                    return 128 + number
                if number == signal.SIGTSTP:
                    _suspend(screen)
                elif number == signal.SIGCONT:  # after a SIGSTOP from outside the shell has used the terminal
                    screen.leave()
                    screen.enter()
                screen.forget()
    return 0


def _wait(app: App, keys: Keys, signals: int) -> list[int]:
    """Wait for input, a signal or the next reading; press the keys, and return the numbers of signals."""
    left = None if app.is_paused else max(0.0, app.due - time.monotonic())
    left = ESCAPE_S if keys.is_waiting and (left is None or left > ESCAPE_S) else left
    stdin = sys.stdin.fileno()
    ready, _, _ = select.select([stdin, signals], [], [], left)
    if stdin in ready:
        data = _read(stdin)
        for key in keys.feed(data):
            app.press(key)
        app.is_done = app.is_done or not data  # the terminal is gone
    elif keys.is_waiting:
        for key in keys.flush():
            app.press(key)
    return list(os.read(signals, 1024)) if signals in ready else []


def _read(stdin: int) -> bytes:
    try:
        return os.read(stdin, 1024)
    except OSError:  # EIO: the terminal is gone
        return b""


def _suspend(screen: Screen) -> None:
    """Restore the terminal and stop, as on Ctrl-Z; take the terminal again when continued, as by `fg`."""
    screen.leave()
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
    screen.enter()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Turn signals into bytes in a pipe, and yield its read end.

    A signal thus ends a wait, but interrupts nothing else.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    numbers = (*ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield reading
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
