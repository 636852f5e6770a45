"""An agent in the test's own process: plugin classes made in the test, and the page's view of them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from typing import TYPE_CHECKING

from hookd.target.boot import bootstrap
from hookd.wire.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.wire.page import Record, Snapshot


class Running:
    """The agent that runs, as a test sees it."""

    def __init__(self) -> None:
        self.agent = bootstrap._agent
        self.parts = self.agent.parts
        self._reader = PageReader(os.dup(self.agent._page.fd))

    def plugin(self, name: str) -> object:
        return self.parts.registry.named(name).plugin

    def state(self, name: str) -> str:
        return self.parts.registry.named(name).state

    def read(self) -> Snapshot:
        return self._reader.read()

    def records(self) -> list[Record]:
        return self._reader.records()

    def values(self, family: str) -> dict[tuple[str, ...], float]:
        """The first cell of each series of a family."""
        return {
            series.values: series.cells[0]
            for found in self.read().families
            if found.name == family
            for series in found.series
        }

    def close(self) -> None:
        self._reader.close()


@contextlib.contextmanager
def running(
    *plugins: type | str,
    options: dict[str, str] | None = None,
    method: str = "start",
    clock: Callable[[], int] = time.perf_counter_ns,
    **config: object,
) -> Iterator[Running]:
    """Start an agent with these plugin classes (or names of installed ones), and stop it at the end.

    Args:
        plugins: the classes, or names.
        options: the options of each plugin.
        method: how the agent has started, as in the target's identity.
        clock: the clock that measures steps and plugins, ns.
        config: the rest of the agent's configuration.
    """
    module = types.ModuleType("hookd_of_the_test")
    specs = []
    for plugin in plugins:
        if isinstance(plugin, str):
            specs.append({"name": plugin, "options": options or {}, "by_name": True})
        else:
            setattr(module, plugin.__name__, plugin)
            entry = f"hookd_of_the_test:{plugin.__name__}"
            specs.append({"name": plugin.name, "entry": entry, "options": options or {}, "by_name": True})
    sys.modules["hookd_of_the_test"] = module
    try:
        bootstrap.start({"method": method, "plugins": specs, "lease_s": None, **config}, clock=clock)
        seen = Running()
        try:
            yield seen
        finally:
            seen.close()
            if bootstrap._agent is not None:
                bootstrap.stop()
    finally:
        del sys.modules["hookd_of_the_test"]
