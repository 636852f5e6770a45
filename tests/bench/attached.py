"""hookd in this process, which can be removed and put back between two blocks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import hookd
from hookd.target.boot import bootstrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

    from hookd import Plugin


STILL_STEPS = 64


class Attached:
    """hookd with some plugins; it observes from `__enter__` on.

    Args:
        plugins: as for `hookd.start`.
        budget: the same.
        more: plugins without an entry point.
    """

    def __init__(self, plugins: Iterable[object], *, budget: float = 0.01, more: Iterable[Plugin] = ()) -> None:
        self._plugins, self._budget, self._more = plugins, budget, more
        self._calm_windows = 0

    def __enter__(self) -> Self:
        hookd.start(self._plugins, run="bench", budget=self._budget)
        self.parts = bootstrap._agent.parts
        for plugin in self._more:
            self.parts.loading.load(plugin, {}, by_name=True)
        return self

    def __exit__(self, *_: object) -> None:
        hookd.stop()

    def settle(self, step: Callable[[], object], at_most: int) -> None:
        """Train until the governor has left all intervals unchanged for some of its windows."""
        still, before = 0, self.intervals()
        for _ in range(at_most):
            step()
            now = self.intervals()
            still, before = still + 1 if now == before else 0, now
            if still >= STILL_STEPS:
                return

    def leave(self) -> None:
        """Put back everything that hookd has replaced."""
        governor = self.parts.governor
        self._calm_windows = governor._calm_windows
        if self.parts.dispatch.accounts.is_metered:  # the step that was to be metered does not come
            governor._metered.pop(governor._kind, None)
        assert self.parts.arming.disarm() == "identity"

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Observe during the block."""
        # The time since the last block is not a step: counted as one, it would halve the share that the governor computes.
        governor = self.parts.governor
        governor.forget_time()
        self.parts.models.counting.meter(is_metered=False)
        self.parts.arming.arm()
        self.parts.models.replan()
        governor._calm_windows = self._calm_windows  # observing again is not a change
        try:
            yield
        finally:
            self.leave()

    def intervals(self) -> dict[str, int]:
        """Return the steps between two calls of each plugin's rarest hooks, as the governor has set them."""
        return {entry.name: entry.stretch for entry in self.parts.registry.loaded.values()}
