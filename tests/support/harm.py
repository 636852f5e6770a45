"""Compare a training with hookd to the same training without it."""

from __future__ import annotations

import functools
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

import hookd
from hookd.target.boot import bootstrap
from hookd.target.remote import control
from tests.support.evidence import difference, train

if TYPE_CHECKING:
    from tests.support.evidence import Make, Seen

STEPS = 6
"""The first five are observed, and the fourth has a NaN in its input."""
ALL = ("capture", "nan", "timing", "activations", "learning", "memory", "optimizer", "coverage", "drift")
KINDS = ("default", "all")


class Observed:
    """hookd from before the first step to before the last, with all of its periodic work."""

    def __init__(self, plugins: list[Any]) -> None:
        self.plugins = plugins
        self.problems: list[str] = []

    def __call__(self, step: int) -> None:
        if step == 0:
            hookd.start(self.plugins, budget=100.0)
            # It ticks below, in this thread. A hookd thread that looks at stacks keeps the objects of their frames alive a
            # moment longer, and autograd copies a gradient that has another reference: the same bits, but another version.
            bootstrap._agent._control._tick = bootstrap._agent._control.poll = _nothing
        elif step == STEPS - 1:
            self.problems = _errors()
            residue = hookd.stop()
            assert residue["restored"] == "identity", residue
            assert not residue["residue"], residue
        if 0 < step < STEPS - 1:
            agent = bootstrap._agent
            agent.parts.ticks.tick(time.time() + 60 * step)
            agent.parts.models.coverage.update(is_training_thread=False)
            _toured(agent)


def harm(make: Make, kind: str) -> str:
    """Return the first difference under the default plugins, or under all observers at every step; "" if there is none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, own = _plain(make)
        if own:
            return f"it differs from itself: {own}"
        with tempfile.TemporaryDirectory() as directory:
            observed, seen = _observed(make, _plugins(kind, directory))
        return difference(plain, seen) or "; ".join(observed.problems)
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=4)
def _plain(make: Make) -> tuple[list[Seen], str]:
    plain = train(make, STEPS, _nothing)
    return plain, difference(plain, train(make, STEPS, _nothing))


def _observed(make: Make, plugins: list[Any]) -> tuple[Observed, list[Seen]]:
    observed = Observed(plugins)
    tick, control.TICK_S = control.TICK_S, 0.01  # the end waits for it
    try:
        return observed, train(make, STEPS, observed)
    finally:
        if bootstrap._agent is not None:
            hookd.stop()
        control.TICK_S = tick


def _nothing(_when: float = 0.0) -> None:
    """Stand in for observers, and for periodic work."""


def _plugins(kind: str, directory: str) -> list[Any]:
    if kind == "default":
        return list(hookd.api.inprocess.DEFAULT)
    options: dict[str, dict[str, Any]] = {name: {"every": 1} for name in ALL}
    options["capture"].update(directory=directory)
    options["activations"].update(parameters=True, histogram=True)
    options["drift"].update(replicated="all")
    options["gradclip"] = {"dry_run": True}
    return list(options.items())


def _errors() -> list[str]:
    """Return the errors of hooks and of hookd itself: a contained error is an error all the same."""
    parts = bootstrap._agent.parts
    from hookd.wire.page import PageReader

    reader = PageReader(bootstrap.page())
    try:
        logs = [entry["message"] for entry in reader.read().logs if entry["level"] == "error"]
    finally:
        reader.close()
    found = [f"{entry.name}: {entry.last_error['text']}" for entry in parts.registry.loaded.values() if entry.errors]
    return found + logs


def _toured(agent: Any) -> None:
    """Look at the models as `hookd snapshot` does."""
    from hookd.target.modeltree.snapshot import SnapshotCursor

    cursor = SnapshotCursor(agent.parts.models, agent.parts.registry)
    while cursor.row() is not None:
        pass
