"""Counts the micro-batches of a step: with gradient accumulation, several backwards add to the gradients of one step.

A micro-batch is a call of the main root with its backward. A step may have more of one than of the other: a loss of two parts with a
backward each, a siamese model that is called twice. So the smaller number counts. In a step of several optimizers, such as a
GAN's, it is the largest number before one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire.module_names import ROOT

if TYPE_CHECKING:
    from hookd.api.events import Module


class MicroBatches:
    """Counts the micro-batches of the step in progress, in all threads."""

    def __init__(self) -> None:
        self._calls = self._backwards = 0  # since the last optimizer
        self._most = 0  # before one of the step's optimizers

    def call_begins(self, root: Module) -> None:
        """Count an outermost call of the training."""
        if root.name == ROOT:
            self._calls += 1

    def backward_begins(self) -> None:
        """Count a backward."""
        self._backwards += 1

    def optimizer_begins(self) -> None:
        """Note what has been counted for an optimizer's step. A closure that it calls makes no further micro-batches."""
        self._most = max(self._most, min(self._calls, self._backwards))

    def optimizer_done(self) -> None:
        """Begin to count for the next optimizer."""
        self._calls = self._backwards = 0

    def take(self) -> int:
        """Return the number for the step that is over, at least 1."""
        most, self._most = self._most, 0
        return max(1, most)
