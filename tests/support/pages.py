"""Ranks of a job that are only pages of this very process, for the daemon's view of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet.fleet import Fleet
from hookd.tool.daemon.fleet.targets import Target
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.wire import labels
from hookd.wire.page import PageWriter

if TYPE_CHECKING:
    import contextlib


def new_fleet(stack: contextlib.ExitStack) -> Fleet:
    """Return a fleet without targets, which keeps its incidents in memory."""
    store = IncidentStore.open(None)
    stack.callback(store.close)
    return Fleet(store, linger_s=1.0)


class Ranks:
    """The pages of a run's ranks and the targets that a daemon has of them."""

    def __init__(self, stack: contextlib.ExitStack, ranks: int, *, run: str = "train.py") -> None:
        self.pages: list[PageWriter] = []
        self.targets: list[Target] = []
        for rank in range(ranks):
            identity = {"pid": os.getpid(), "run": run, "rank": rank, "is_named": True, "world_size": ranks}
            page = PageWriter.create(identity)
            page.set_state("running")
            stack.callback(page.close)
            target = Target(os.getpid(), os.dup(page.fd))
            stack.callback(target.close)
            target.claim = labels.Claim(os.getpid(), os.getpid(), str(rank), run, run)
            self.pages.append(page)
            self.targets.append(target)

    def add(self, rank: int, name: str, amount: float, **values: str) -> None:
        """Add to a counter."""
        cells, at = self._cell(rank, name, "counter", values)
        cells[at] += amount

    def set(self, rank: int, name: str, value: float, **values: str) -> None:
        """Set a gauge."""
        cells, at = self._cell(rank, name, "gauge", values)
        cells[at] = value

    def _cell(self, rank: int, name: str, kind: str, values: dict[str, str]) -> tuple[memoryview, int]:
        page = self.pages[rank]
        family = page.family(name, kind, "Help.", tuple(values))
        return page.cells, page.series(family, tuple(values.values()))
