"""The loss as a number that can be looked at. Runs in the target."""

from __future__ import annotations

from typing import Any

from hookd import Context

BACKWARDS = 4
"""Of so many backwards between two optimizer steps: gradient accumulation has one for each part of a batch."""
PATIENCE = 64
"""Steps without a backward after which its series ends: one that is skipped makes the next backward a second one."""


class Loss:
    """Shows what each backward of a step was called on; under a GradScaler that is the loss times its scale."""

    def __init__(self, context: Context) -> None:
        self._gauge = context.gauge("loss", "What a backward was called on, at the last step.", ["backward"])
        self._known: list[Any] = []
        self._idle = 0

    def show(self, place: int, value: float) -> None:
        """Show the loss of one backward; `place` counts those of a step from 0. At every step, so it costs 0.2 us."""
        if place < BACKWARDS:
            while len(self._known) <= place:
                self._known.append(self._gauge.labels(str(len(self._known))))
            self._known[place].set(value)

    def end_step(self, backwards: int) -> None:
        """End the last series when steps have had fewer backwards for a while."""
        self._idle = self._idle + 1 if backwards < len(self._known) else 0
        if self._idle >= PATIENCE:
            self._known.pop()
            self._gauge.remove(str(len(self._known)))
            self._idle = 0
