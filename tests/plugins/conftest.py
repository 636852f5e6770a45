"""hookd in this process, and what its plugins said, read from the page as the daemon reads it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

import hookd
from hookd.agent import bootstrap
from hookd.page import PageReader

if TYPE_CHECKING:
    from collections.abc import Iterator


class Observation:
    """hookd running in this process with the plugins of one test."""

    def __init__(self) -> None:
        self.reader: PageReader | None = None

    def start(self, *names: str, **options: object) -> Observation:
        """Start with one plugin and its options, or with several that have none."""
        plugins = [(names[0], options)] if options else list(names)
        hookd.start(plugins, run="test", budget=100.0)  # nothing is slowed down: these tests are about numbers
        self.reader = PageReader(os.dup(bootstrap._agent._page.fd))
        return self

    def stop(self) -> None:
        """Detach; the page can still be read."""
        hookd.stop()

    def metric(self, name: str) -> dict[tuple[str, ...], float]:
        """Give all series of a counter or gauge by their label values."""
        for family in self.reader.read().families:
            if family.name == f"hookd_{name}":
                return {series.values: series.cells[0] for series in family.series}
        raise KeyError(name)

    def value(self, name: str, *labels: str) -> float:
        return self.metric(name)[labels]

    @property
    def incidents(self) -> list[dict]:
        return self.reader.read().incidents

    @property
    def incident(self) -> dict:
        """The only one there is."""
        (one,) = self.incidents
        return one

    @property
    def errors(self) -> dict[tuple[str, ...], float]:
        return {k: v for k, v in self.metric("plugin_errors").items() if v}

    @property
    def logs(self) -> list[str]:
        return [entry["message"] for entry in self.reader.read().logs]


@pytest.fixture
def hook() -> Iterator[Observation]:
    """hookd, not started yet; after the test no plugin may have raised anything."""
    torch.manual_seed(0)
    one = Observation()
    yield one
    if one.reader is not None:
        errors, logs = one.errors, one.logs
        if hookd_runs():
            hookd.stop()
        one.reader.close()
        assert not errors, logs


def hookd_runs() -> bool:
    return bootstrap._agent is not None
