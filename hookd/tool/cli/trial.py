"""Run an untrusted program to its end, and kill all processes that it has started.

A process between hookd and the program adopts orphaned descendants (PR_SET_CHILD_SUBREAPER), so that a fork into a session
of its own does not escape. This contains accidents, not attacks: the program has the rights of the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import IO

from hookd.errors import HookdError

MOST_OUTPUT = 1 << 16
"""Bytes of stderr that are kept, from its end."""
_NOT_STARTED, _TOO_LONG = 77, 78
_MARGIN_S = 15.0
_KEEPER = f"""
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    try:
        code = subprocess.call(sys.argv[2:], stdin=subprocess.DEVNULL, timeout=float(sys.argv[1]))
    except subprocess.TimeoutExpired:
        code = {_TOO_LONG}
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        code = {_NOT_STARTED}
finally:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with open("/proc/self/task/%d/children" % os.getpid()) as file:
            for child in file.read().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
sys.exit(code if code >= 0 else 128 - code)
"""


def finished(words: list[str], timeout_s: float) -> tuple[int, str]:
    """Run a program to its end; no daemon attaches to it.

    Returns:
        Its exit code, 128 plus the number for a signal, and the end of its stderr.

    Raises:
        HookdError: it cannot be started, or takes too long.
    """
    command = [sys.executable, "-I", "-S", "-c", _KEEPER, f"{timeout_s:g}", *words]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "HOOKD_DISABLE": "1"},
    ) as process:
        tail = _Tail(process.stderr)
        try:
            code = process.wait(timeout_s + _MARGIN_S)
        except BaseException:  # including Ctrl-C
            _end(process)
            raise
        stderr = tail.text()
    if code == _NOT_STARTED:
        raise HookdError(f"{words[0]}: {stderr.strip()}", hint="Use --python with the path of a Python that has torch.")
    if code == _TOO_LONG:
        hint = "Look for a hook that waits, or an endless loop. `--static` runs nothing."
        raise HookdError(f"the trial timed out after {timeout_s:g} s", hint=hint)
    return code, stderr


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_MARGIN_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Tail:
    """The last bytes of a stream that may be endless; a thread reads it."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._stream is not None
        while part := os.read(self._stream.fileno(), MOST_OUTPUT):
            self._kept = (self._kept + part)[-MOST_OUTPUT:]

    def text(self) -> str:
        self._thread.join(_MARGIN_S)
        return self._kept.decode(errors="replace")
