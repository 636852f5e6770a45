"""Many targets without torch, at the cost of a fork each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.environment import tool_environment
from tests.support.processes import Process

PROGRAM = Path(__file__).with_name("page_herd.py")


class Herd:
    """Processes that hold real pages, forked from one; see `page_herd.py` for how they live and end."""

    def __init__(self) -> None:
        self.process = Process([sys.executable, PROGRAM], env=tool_environment(), stdin=True)
        self.process.expect("^ready$")

    def start(self, count: int, run: str, modules: int = 8) -> list[int]:
        """Start some targets, each of a run of its own; return their pids once they hold their pages."""
        return json.loads(self._ask("start", count=count, run=run, modules=modules))

    def end(self, pids: list[int], how: str) -> None:
        """End some targets: by "kill", "exit", "leave" or "spoil"."""
        self._ask("end", pids=pids, how=how)

    def signal(self, pid: int, how: str) -> None:
        """Send one target the signal to end in this way."""
        self._ask("signal", pid=pid, how=how)

    def close(self) -> None:
        """End them all."""
        self.process.close()

    def _ask(self, verb: str, **arguments: object) -> str:
        return self.process.ask(json.dumps({verb: arguments}), r"^(\[.*\]|\d+)$").group()
