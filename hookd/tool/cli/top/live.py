"""The loop of `hookd top` on a terminal: reads, draws, and waits for a key, a signal or the next reading."""

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
"""How long after an ESC the rest of a key may come: a slow line tears them apart."""


def run(app: App) -> int:
    """Show the app until it is done or a signal ends it; give the exit status, 128 and the signal's number for one."""
    keys = Keys()
    with _signals() as came, Screen(sys.stdin, sys.stdout) as screen:
        while not app.is_done:
            if not app.is_paused and time.monotonic() >= app.due:
                app.refresh(time.monotonic())
            screen.draw(app.lines(*screen.size()))
            for number in _wait(app, keys, came):
                if number in ENDING:
                    return 128 + number
                if number == signal.SIGTSTP:
                    _suspend(screen)
                elif number == signal.SIGCONT:  # stopped by somebody's SIGSTOP: the shell has used the terminal since
                    screen.leave()
                    screen.enter()
                screen.forget()
    return 0


def _wait(app: App, keys: Keys, came: int) -> list[int]:
    """Wait for something to do; press the keys, and give the signals."""
    left = None if app.is_paused else max(0.0, app.due - time.monotonic())
    left = ESCAPE_S if keys.is_waiting and (left is None or left > ESCAPE_S) else left
    stdin = sys.stdin.fileno()
    ready, _, _ = select.select([stdin, came], [], [], left)
    if stdin in ready:
        data = _read(stdin)
        for key in keys.feed(data):
            app.press(key)
        app.is_done = app.is_done or not data  # the terminal has gone
    elif keys.is_waiting:
        for key in keys.flush():
            app.press(key)
    return list(os.read(came, 1024)) if came in ready else []


def _read(stdin: int) -> bytes:
    try:
        return os.read(stdin, 1024)
    except OSError:  # EIO: the terminal has gone
        return b""


def _suspend(screen: Screen) -> None:
    """Stop as any program does at Ctrl-Z, with the terminal as the shell wants it; go on where `fg` says so."""
    screen.leave()
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
    screen.enter()


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Turn signals into bytes of a pipe, which ends a wait, and interrupts nothing else; give its end for reading."""
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
