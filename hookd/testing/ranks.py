"""A rank that is nothing but a page and a process that waits: what a daemon half is tested on. No torch is needed."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from hookd.wire.page import PageWriter

if TYPE_CHECKING:
    from collections.abc import Callable

_WAITING = ("/bin/sh", "-c", "read code; exit $code")
"""A process that ends with the number that it reads."""


class FakeRank:
    """One rank of a run: a page as an agent writes it, and a process of its own, which can end in every real way.

    Made by `FakeDaemon.ranks`. What is written here is seen by the daemon at its next look.

    Args:
        run: the job.
        rank: its number there.
        ended: called when its process has ended.

    Attributes:
        run: the job.
        rank: as the label has it.
        pid: of its process.
        page: the writer of its page, for what has no method here.
    """

    def __init__(self, run: str, rank: int, ended: Callable[[FakeRank], None]) -> None:
        self.run, self.rank = run, str(rank)
        self._ended = ended
        self._process = subprocess.Popen(_WAITING, stdin=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.page = PageWriter.create({"pid": self.pid, "run": run, "rank": rank})
        self.page.set_state("running")

    def run_steps(self, count: int = 1) -> None:
        """Count so many optimizer steps."""
        self.count("hookd_steps", count)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter, whose name has no `_total` here."""
        cell = self._cell(name, "counter", labels)
        self.page.cells[cell] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        cell = self._cell(name, "gauge", labels)
        self.page.cells[cell] = value

    def _cell(self, name: str, kind: str, labels: dict[str, str]) -> int:
        family = self.page.family(name, kind, "Made by a test.", tuple(labels))
        return self.page.series(family, tuple(labels.values()))

    def incident(self, kind: str, message: str, **fields: object) -> None:
        """Tell of something, as a plugin in the target does with `context.incident`."""
        self.page.incident({"kind": kind, "message": message, **fields})

    def detach(self) -> None:
        """Have its agent leave; the process goes on."""
        self.page.set_state("detached")

    def end(self, code: int = 0) -> None:
        """Have it come to Python's own exit, with this code."""
        self.page.set_state("exited")
        self._end(f"{code}\n")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal."""
        self._process.send_signal(number)
        self._end("")

    def _end(self, told: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(told)
        self._process.stdin.close()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its status is still to be asked for
        self._ended(self)
        self._process.wait()

    def close(self) -> None:
        """End the process, and let go of the page."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()
        self.page.close()
