"""The loss as a number that can be looked at. Runs in the target."""

from __future__ import annotations

from typing import Any

from hookd import Context

BACKWARDS = 4
"""Of so many backwards of a step: a GAN has two, gradient accumulation one for each part of a batch."""


class Loss:
    """Shows what each backward of a step was called on; under a GradScaler that is the loss times its scale."""

    def __init__(self, context: Context) -> None:
        self._gauge = context.gauge("loss", "What a backward was called on, at the last step.", ["backward"])
        self._known: list[Any] = []

    def show(self, place: int, value: float) -> None:
        """Show the loss of one backward; `place` counts those of a step from 0. At every step, so it costs 0.2 us."""
        if place < BACKWARDS:
            while len(self._known) <= place:
                self._known.append(self._gauge.labels(str(len(self._known))))
            self._known[place].set(value)
