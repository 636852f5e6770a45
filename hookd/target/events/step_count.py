"""The number of the step in progress. Runs in the target.

`hookd.target.events.steps` alone counts; everybody else reads.
"""

from __future__ import annotations


class StepCount:
    """Counts the steps of the training.

    Attributes:
        done: steps completed since the attach: those of the optimizer that has made the most (a GAN has two).
        calls: outermost calls of models since the attach, while nothing had been trained.
        offset: what to add to get the number since the beginning of the training, None while unknown.
        is_open: whether the step that is over may still get more: other optimizers.
        is_closing: whether plugins are being told that it is over.
    """

    def __init__(self, *, from_beginning: bool) -> None:
        self.done = self.calls = 0
        self.offset: int | None = 0 if from_beginning else None
        self.is_open = self.is_closing = False

    @property
    def turns(self) -> int:
        """Steps since the attach, and the calls that stood for them before there were any."""
        return self.done + self.calls

    def number(self) -> int:
        """Return the number of the step in progress, from 1, counted from the attach."""
        return self.done + (0 if self.is_open else 1)

    def absolute(self) -> int:
        """Return the number of the step in progress, from 1, counted from the beginning of the training where that is known."""
        return (
            self.done + (not self.is_open) + (self.offset or 0)
        )  # without `number`: plugins ask some ten times a step

    def origin(self) -> str:
        """Return the step in progress in words, with what it counts from."""
        return f"step {self.absolute()}" + ("" if self.offset is not None else " (counted from the attach)")
