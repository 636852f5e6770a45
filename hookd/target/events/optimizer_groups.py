"""Groups of optimizers that step together: one after the other, after one backward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Ref = weakref.ref[Any]  # optimizers are known by their id, for they may not be hashable

MOST_TURNS = 64
"""Largest number of optimizers that may take turns."""
MOST_SIZES = 1000
"""Largest number of row sizes that are remembered; at this number all are forgotten, as each step may create optimizers."""


class OptimizerRow:
    """Infers which optimizers together make one step of the training.

    It uses the order in which they step. Optimizers that step with nothing else in between form a *row*. The expected
    length of a row is that of the longest one that the same optimizer began. Two optimizers that take turns, as those of a
    GAN do, are in separate rows, and also make one step together.

    Attributes:
        is_counted: whether an optimizer in the row has made a step of the training.
    """

    def __init__(self) -> None:
        self._row: dict[int, Ref] = {}
        self.is_counted = False
        self._since_step: dict[int, Ref] = {}  # all that have stepped since the last step was made
        self._sizes: dict[int, int] = {}  # size of the longest row, by the optimizer that begins it

    def end_row(self) -> None:
        """End the row, because something else begins."""
        if self._row:
            self._row, self.is_counted = {}, False

    def is_in_row(self, optimizer: Any) -> bool:
        """Whether this optimizer has stepped in the current row."""
        return _is_in(self._row, optimizer)

    def add(self, optimizer: Any) -> bool:
        """Add an optimizer that has stepped to the row; return whether it makes a step of the training.

        The first of a row that has also stepped since the last such step does.
        """
        makes_step = not self.is_counted and (_is_in(self._since_step, optimizer) or self._begins_step())
        if makes_step:
            self._since_step, self.is_counted = {}, True
        self._since_step[id(optimizer)] = self._row[id(optimizer)] = weakref.ref(optimizer)
        if len(self._row) > self._size():
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            self._sizes[next(iter(self._row))] = len(self._row)
        return makes_step

    def _begins_step(self) -> bool:
        """Whether an optimizer new since the last step makes one: it is the first, or the training keeps creating optimizers."""
        others = len(self._since_step) - len(self._row)
        return not self._since_step or others > MOST_TURNS or any(ref() is None for ref in self._since_step.values())

    def is_complete(self) -> bool:
        """Whether the row has its expected length."""
        return len(self._row) >= self._size()

    def _size(self) -> int:
        return self._sizes.get(next(iter(self._row), 0), 1)


def _is_in(refs: dict[int, Ref], optimizer: Any) -> bool:
    ref = refs.get(id(optimizer))
    return ref is not None and ref() is optimizer
