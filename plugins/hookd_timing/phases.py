"""Where a step's time goes: every moment of the training thread belongs to exactly one phase. Runs in the target."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookd import Counter

PHASES = ("data", "forward", "backward", "optimizer", "other")
TRAINING = ("backward", "optimizer")
"""What a thread that only evaluates does not do."""
OFTEN_NS = 100_000_000
"""In a thread that steps, time is shown at each step, and so long after it was last: at each turn would cost more than to take it."""


class Phases(threading.local):
    """The phase that the calling thread is in, and since when.

    Each thread has its own. One that never goes backward or steps is no training thread: its time is not counted.
    """

    def __init__(self, seconds: Counter) -> None:
        self._children = {name: seconds.labels(name) for name in PHASES}
        self._unpublished_ns = dict.fromkeys(PHASES, 0)
        self._trains = self._steps = False
        self._name = ""
        self._since_ns = self._published_ns = 0

    def turn(self, name: str, now_ns: int) -> None:
        """Go over to another phase."""
        if self._since_ns:
            self._unpublished_ns[self._name] += now_ns - self._since_ns
        self._name, self._since_ns = name, now_ns
        if name in TRAINING:
            self._trains = True
        if self._trains and (not self._steps or now_ns - self._published_ns > OFTEN_NS):
            self._publish()

    def step_done(self) -> None:
        """Show what has passed until the last turn."""
        self._steps = True
        self._publish()

    def _publish(self) -> None:
        self._published_ns = self._since_ns
        for name, ns in self._unpublished_ns.items():
            if ns:
                self._children[name].inc(ns * 1e-9)
                self._unpublished_ns[name] = 0
