"""Start a process, follow its output, wait for conditions, end it by its handle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.support.environment import BARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import TypeVar

    from typing_extensions import Self

    T = TypeVar("T")

TARGET_NICENESS = 10
PATIENCE_S = 180.0
"""How long a test waits for something that takes a second on an idle machine; only failures wait that long."""
STARTED: list[Process] = []
"""The processes of this test, and those of earlier ones that still run, for the report of a failure."""


def wait_until(condition: Callable[[], T], timeout_s: float = PATIENCE_S, what: str | Callable[[], str] = "") -> T:
    """Poll until `condition` returns something true, and return that.

    A slow condition, such as one that runs a command, is checked less often, to leave the processor to the process in question.

    Raises:
        AssertionError: it did not become true in time; the text says `what` is missing.
    """
    begun = time.monotonic()
    end = begun + timeout_s
    while not (value := condition()):
        asked = time.monotonic()
        assert asked < end, f"not within {timeout_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(min(0.25, max(0.01, 5 * (asked - begun))))
        begun = time.monotonic()
    return value


class Process:
    """A child process whose lines are collected as they come.

    Args:
        command: the command line.
        env: its environment.
        cwd: its working directory, None: this one.
        stdin: whether it is sent lines; otherwise its stdin is empty.
        popen: starts it, as `subprocess.Popen` does.

    Attributes:
        out: the lines of its stdout so far.
        err: the lines of its stderr so far.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: bool = False,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.command = [str(part) for part in command]
        self._states_at_error: list[str] = []
        self._news = threading.Condition()
        self._open = 2
        self.popen = popen(
            self.command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if any(BARE in part for part in self.command):  # a target would keep from the processor what a test waits for
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.pid, TARGET_NICENESS)
        self._readers = [
            threading.Thread(target=self._collect, args=pair, daemon=True)
            for pair in ((self.popen.stdout, self.out), (self.popen.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        STARTED.append(self)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _collect(self, stream: IO[str], lines: list[str]) -> None:
        with stream:  # here, for a grandchild may hold it open for longer than anybody waits
            for line in stream:
                with self._news:
                    lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    def expect(self, pattern: str, *, after: int = 0, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait for a line of stdout or stderr, from the line number `after` of stdout on, that matches."""
        end = time.monotonic() + timeout_s
        with self._news:
            while (match := self._search(pattern, after)) is None:
                left = end - time.monotonic()
                assert left > 0, f"no line like {pattern!r} within {timeout_s} s from {self.describe()}"
                assert self._open, f"ended without a line like {pattern!r}: {self.describe()}"
                self._news.wait(left)
        return match

    def _search(self, pattern: str, after: int) -> re.Match[str] | None:
        return next(filter(None, (re.search(pattern, line) for line in [*self.out[after:], *self.err])), None)

    def send(self, line: str) -> None:
        """Write one line to its stdin."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def ask(self, line: str, answer: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Write one line, and wait for a later line of stdout that matches `answer`."""
        before = len(self.out)
        self.send(line)
        return self.expect(answer, after=before, timeout_s=timeout_s)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = 2 * PATIENCE_S) -> int:
        """Wait for its end and its last line; return the exit status."""
        try:
            status = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s: {self.describe()}") from None
        for reader in self._readers:
            reader.join(timeout_s)
        return status

    def finish(self, timeout_s: float = 2 * PATIENCE_S) -> list[str]:
        """Wait for an end without error; return the lines of its stdout."""
        status = self.wait(timeout_s)
        assert status == 0, f"exit status {status}: {self.describe()}"
        return self.out

    def describe(self) -> str:
        tail = [*self.out[-15:], "-- stderr:", *self.err[-100:]]
        if self._states_at_error:
            tail += ["state at the error:", *self._states_at_error]
        return "\n".join([" ".join(self.command), f"pid {self.pid}, status {self.popen.poll()}", *tail])

    def close(self) -> None:
        """End it if it still runs, with all that it started, and release the pipes."""
        if self.popen.poll() is None:
            below = list(_pidfds(descendants(self.pid)))
            self.popen.kill()
            for child in below:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                os.close(child)
        self.popen.wait(PATIENCE_S)
        if self.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.popen.stdin.close()
        for reader in self._readers:
            reader.join(1)  # a grandchild may hold the pipe open
        for reader, stream in zip(self._readers, (self.popen.stdout, self.popen.stderr), strict=True):
            if stream is not None and not reader.is_alive():
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.popen.poll() is None:
            self._states_at_error = list(states([self.pid, *descendants(self.pid)]))
        self.close()


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below one.

    Not by psutil: that reads the state of every process of the machine, and waits for one that never ends its exec.
    """
    found, parents = [], [pid]
    while parents:
        files: list[Path] = []
        with contextlib.suppress(OSError):  # it has just ended
            files = list(Path(f"/proc/{parents.pop()}/task").glob("*/children"))
        for file in files:
            with contextlib.suppress(OSError):
                children = [int(word) for word in file.read_text().split()]
                found += children
                parents += children
    return found


def states(pids: list[int]) -> Iterator[str]:
    """Yield one line for each process, from those files of /proc that never wait for a lock of the process."""
    yield "   PID   PPID STATE         THREADS  CPU_S  NAME"
    for pid in sorted(pids):
        try:
            lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
            cpu_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError):
            continue  # it has just ended
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        parent, state, threads, name = (fields.get(name, "?") for name in ("PPid", "State", "Threads", "Name"))
        yield f"{pid:6} {parent:>6} {state:13} {threads:>7} {cpu_s:6.1f}  {name}"


def _pidfds(pids: list[int]) -> Iterator[int]:
    """Yield a pidfd of each process that still is there. The caller closes it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield os.pidfd_open(pid)
