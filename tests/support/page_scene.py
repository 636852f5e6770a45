"""A run that a daemon watches, and its page, without the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet.history import EVERY_S, History
from hookd.tool.daemon.web.pages import frame, run
from hookd.tool.daemon.web.pages.run import Choice
from tests.support.pages import Ranks

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.incident import IncidentRow


class Watched:
    """Ranks of one run with a history, on a clock of the test's own."""

    def __init__(self, stack: contextlib.ExitStack, ranks: int = 1, name: str = "job") -> None:
        self.now = 1000.0
        self.ranks = Ranks(stack, ranks, run=name)
        self.name = name
        self.history = History(lambda: self.now, lambda: self.now)

    @property
    def targets(self) -> list[Target]:
        return self.ranks.targets

    def step(self, rank: int = 0, seconds: float = 0.1, loss: float | None = None) -> None:
        """Take a step, and have the daemon look a while later."""
        page = self.ranks.pages[rank]
        self.ranks.add(rank, "hookd_steps", 1.0)
        first = page.series(page.family("hookd_step_seconds", "histogram", "x", (), (1.0,)), ())
        page.cells[first] += 1.0
        page.cells[first + 2] += seconds
        if loss is not None:
            self.ranks.set(rank, "hookd_activations_loss", loss, backward="0")

    def poll(self) -> None:
        self.now += EVERY_S
        for target in self.targets:
            target.read()
        self.history.poll(self.targets)

    def run(self, incidents: Sequence[IncidentRow] = (), **query: str) -> str:
        parts = run.parts(self.name, self.targets, self.history, incidents, Choice.of(query))
        return frame.page(run.title(self.name, self.targets), parts)
