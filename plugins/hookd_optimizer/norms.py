"""Sum up the norms of parameter groups over several steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable

from torch import Tensor

from hookd import of_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd import Context, Summary


HOST = ("cpu", "meta")


class Norms:
    """Cycles through the parameters of one optimizer, some in each step.

    Args:
        store: called with a group's number and its norm once all of its parameters have been summed up.
    """

    def __init__(self, context: Context, store: Callable[[int, float], None]) -> None:
        self._context = context
        self._store = store
        self._group = self._parameter = 0  # the next parameter
        self._sum = _Sum(store, 0)

    def advance(self, groups: Sequence[Sequence[Tensor]], most: int) -> None:
        """Add the next parameters until they have `most` elements together: at least one, and each at most once."""
        left = most
        for _ in range(sum(map(len, groups)) + len(groups)):
            if self._group >= len(groups):
                self._begin(0)
            params = groups[self._group] if groups else ()
            if self._parameter < len(params):
                parameter = params[self._parameter]
                self._parameter += 1
                left -= Tensor.numel(parameter)
                self._sum.add(self._context, parameter)
            if self._parameter >= len(params):
                self._sum.close()
                self._begin(self._group + 1)
            if left <= 0:
                return

    def _begin(self, group: int) -> None:
        self._group, self._parameter = group, 0
        self._sum = _Sum(self._store, group)


class _Sum:
    """The sum of squares of one group; those of parameters on a device arrive later."""

    def __init__(self, store: Callable[[int, float], None], group: int) -> None:
        self._store, self._group = store, group
        self._squares = 0.0
        self._due = 0
        self._is_closed = False

    def add(self, context: Context, parameter: Tensor) -> None:
        """Request the squares of one more parameter."""
        self._due += 1
        is_known = context.summary(parameter, self._arrived) is not None
        if not is_known and (of_tensor(parameter, "device").type in HOST or not Tensor.numel(parameter)):
            self._due -= 1  # it has no values: nothing will arrive

    def close(self) -> None:
        """Declare the group complete."""
        self._is_closed = True
        self._end()

    def _arrived(self, summary: Summary) -> None:
        self._squares += summary.norm * summary.norm
        self._due -= 1
        self._end()

    def _end(self) -> None:
        if self._is_closed and not self._due:
            self._store(self._group, math.sqrt(self._squares))
