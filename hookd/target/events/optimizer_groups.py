"""Which optimizers step together: one after the other, after one backward. Runs in the target."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Ref = weakref.ref[Any]  # optimizers are known by their id, for they may not be hashable

MOST_TURNS = 64
"""So many optimizers may take turns."""
MOST_SIZES = 1000
"""The sizes of so many rows are remembered; they are forgotten where optimizers are made anew at each step."""


class Together:
    """Tells from the order in which optimizers step which of them make one step of the training.

    Those of a *row* have stepped with nothing else between. How long a row will be is known from the row before that the
    same optimizer began. Two that take turns, as those of a GAN do, are in rows of their own and make one step as well.
    """

    def __init__(self) -> None:
        self._row: dict[int, Ref] = {}
        self._is_counted = False  # there is one in the row that made a step
        self._turn: dict[int, Ref] = {}  # all that have stepped since the last step was made
        self._sizes: dict[int, int] = {}  # of the longest row, by the optimizer that begins it

    def end_row(self) -> None:
        """Note that something else begins."""
        if self._row:
            self._row, self._is_counted = {}, False

    def is_in_row(self, optimizer: Any) -> bool:
        """Say whether this optimizer has stepped in the row."""
        return _is_in(self._row, optimizer)

    def add(self, optimizer: Any) -> bool:
        """Note that an optimizer has stepped.

        Returns:
            Whether it makes a step: the first in its row to have stepped since the step before.
        """
        makes_step = not self._is_counted and (_is_in(self._turn, optimizer) or self._is_new_turn())
        if makes_step:
            self._turn, self._is_counted = {}, True
        self._turn[id(optimizer)] = self._row[id(optimizer)] = weakref.ref(optimizer)
        if len(self._row) > self._size():
            if len(self._sizes) >= MOST_SIZES:
                self._sizes.clear()
            self._sizes[next(iter(self._row))] = len(self._row)
        return makes_step

    def _is_new_turn(self) -> bool:
        """Say whether an optimizer that has not stepped yet makes a step: the first, or where they are made anew."""
        others = len(self._turn) - len(self._row)
        return not self._turn or others > MOST_TURNS or any(ref() is None for ref in self._turn.values())

    def is_whole(self) -> bool:
        """Say whether as many have stepped as in the longest row that began like this one."""
        return len(self._row) >= self._size()

    def _size(self) -> int:
        return self._sizes.get(next(iter(self._row), 0), 1)


def _is_in(refs: dict[int, Ref], optimizer: Any) -> bool:
    ref = refs.get(id(optimizer))
    return ref is not None and ref() is optimizer
