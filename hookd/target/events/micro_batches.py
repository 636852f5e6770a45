"""Counts the micro-batches of a step: with gradient accumulation, several backwards add to the gradients of one step.

A micro-batch is a call of the main root with its backward. A step may have more of one than of the other: a loss of two parts with a
backward each, a siamese model that is called twice. So the smaller number counts. In a step of several optimizers, such as a
GAN's, it is the largest number before one of them.

Lightning runs the last micro-batch in a closure that the optimizer calls. LBFGS calls its closure many times, with the same
micro-batch. So a closure counts as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.wire.module_names import ROOT

if TYPE_CHECKING:
    from hookd.api.events import Module


class MicroBatches:
    """Counts the micro-batches of the step in progress, in all threads."""

    def __init__(self) -> None:
        self._calls = self._backwards = 0  # since the last optimizer, or in it
        self._before = 0  # micro-batches before the optimizer in progress
        self._most = 0  # the largest number for one of the step's optimizers

    def call_begins(self, root: Module) -> None:
        """Count an outermost call of the training."""
        if root.name == ROOT:
            self._calls += 1

    def backward_begins(self) -> None:
        """Count a backward."""
        self._backwards += 1

    def optimizer_begins(self) -> None:
        """Begin an optimizer's step: from now on, what is counted happens in its closure."""
        self._before = self._take_both()

    def optimizer_done(self) -> None:
        """End an optimizer's step, and begin to count for the next one."""
        self._most = max(self._most, self._before + min(self._take_both(), 1))

    def take(self) -> int:
        """Return the number for the step that is over, at least 1."""
        most, self._most = self._most, 0
        return max(1, most)

    def _take_both(self) -> int:
        number = min(self._calls, self._backwards)
        self._calls = self._backwards = 0
        return number
