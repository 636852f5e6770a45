"""The number of the step in progress. Only `hookd.target.events.steps` counts; all other code reads."""

from __future__ import annotations


class StepCount:
    """Counts the steps of the training.

    Attributes:
        done: steps completed since the attach; with several optimizers (a GAN has two), of the one that has made the most.
        calls: outermost calls of models since the attach, as long as nothing has been trained.
        offset: steps of the training before the attach, None while unknown.
        is_open: whether events may still be added to the completed step, as of other optimizers.
        is_closing: whether the hook `step_done` is being called.
    """

    def __init__(self, offset: int | None = None) -> None:
        self.done = self.calls = 0
        self.offset = offset
        self.is_open = self.is_closing = False

    @property
    def turns(self) -> int:
        """Turns since the attach: steps, plus the calls that stood for steps."""
        return self.done + self.calls

    def number(self) -> int:
        """Return the step in progress, from 1, counted from the attach."""
        return self.done + (0 if self.is_open else 1)

    def absolute(self) -> int:
        """Return the step in progress, from 1, counted from the training's beginning, or from the attach if that is unknown."""
        # It does not call `number`, for speed: plugins call this some ten times a step.
        return self.done + (not self.is_open) + (self.offset or 0)

    def origin(self) -> str:
        """Return the step in progress in words, and where counting began if that is not the training's beginning."""
        return f"step {self.absolute()}" + ("" if self.offset is not None else " (counted from the attach)")
