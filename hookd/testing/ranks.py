"""Simulated ranks for tests of daemon plugins: each is a page and an idle process. They do not need torch."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from hookd.wire.page import PageWriter

if TYPE_CHECKING:
    from collections.abc import Callable

_WAITING = ("/bin/sh", "-c", "read code; exit $code")
"""A process that exits with the status that it reads from stdin."""


class FakeRank:
    """A simulated rank of a run: a page as an agent writes it, and its own process, which can exit or be killed.

    Create ranks with `FakeDaemon.ranks`. The daemon sees changes at its next look.

    Args:
        run: name of the run.
        rank: its number in the run.
        ended: called after its process has ended.

    Attributes:
        run: the label `run`.
        rank: the label `rank`.
        pid: of its process.
        page: the writer of its page, for what this class has no method for.
    """

    def __init__(self, run: str, rank: int, ended: Callable[[FakeRank], None]) -> None:
        self.run, self.rank = run, str(rank)
        self._ended = ended
        self._process = subprocess.Popen(_WAITING, stdin=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.page = PageWriter.create({"pid": self.pid, "run": run, "rank": rank})
        self.page.set_state("running")

    def run_steps(self, count: int = 1) -> None:
        """Count `count` optimizer steps."""
        self.count("hookd_steps", count)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter; `name` is with or without `_total`."""
        cell = self._cell(name.removesuffix("_total"), "counter", labels)
        self.page.cells[cell] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        cell = self._cell(name, "gauge", labels)
        self.page.cells[cell] = value

    def _cell(self, name: str, kind: str, labels: dict[str, str]) -> int:
        family = self.page.family(name, kind, "Made by a test.", tuple(labels))
        return self.page.series(family, tuple(labels.values()))

    def incident(self, kind: str, message: str, **fields: object) -> None:
        """Record an incident, as a plugin in the target does with `context.incident`."""
        self.page.incident({"kind": kind, "message": message, **fields})

    def detach(self) -> None:
        """Detach its agent; the process keeps running."""
        self.page.set_state("detached")

    def end(self, code: int = 0) -> None:
        """End the process as Python's normal exit does, with this exit code."""
        self.page.set_state("exited")
        self._end(f"{code}\n")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the process with a signal."""
        self._process.send_signal(number)
        self._end("")

    def _end(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.close()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: the daemon still reads its status
        self._ended(self)
        self._process.wait()

    def close(self) -> None:
        """End the process and release the page."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()
        self.page.close()
