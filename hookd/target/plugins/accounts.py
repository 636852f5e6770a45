"""Time spent in plugins and in hookd itself during metered steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

OWN = -1
"""Stands for hookd itself in place of a plugin's number."""


class Accounts:
    """Sums up the time spent in the step in progress; the governor reads and clears it.

    Args:
        clock: returns the time in ns.

    Attributes:
        is_metered: whether the step in progress is metered: each plugin is timed, and so is hookd itself.
        spent: ns spent in each plugin during a metered step, by the plugin's number, and in hookd itself as `OWN`.
        charged: ns of all plugins and hookd so far.
        calls: number of calls of each plugin's hooks during a metered step, by the plugin's number.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.is_metered = False
        self.spent: dict[int, int] = {}
        self.charged = 0
        self.calls: dict[int, int] = {}
        self._left: tuple[int, int] | None = None

    def leave(self, since: int = 0) -> None:
        """Note that the training's own code is left for hookd's, now or at the time `since` in ns; `come_back` charges hookd with the rest.

        Only the thread that trains calls these two, around what it does for hookd outside of hooks: it may leave again without
        having come back, after an exception.
        """
        self._left = (since or self.clock(), self.charged) if self.is_metered else None

    def come_back(self) -> None:
        """Charge hookd itself with the time since `leave`, without the time charged since then."""
        left, self._left = self._left, None
        if left is not None and self.is_metered:
            self.settle(*left)

    def charge(self, number: int, since: int) -> int:
        """Charge a plugin with the time from `since` on; return the current time in ns."""
        now = self.clock()
        self.spent[number] = self.spent.get(number, 0) + now - since
        self.charged += now - since
        self.calls[number] = self.calls.get(number, 0) + 1
        return now

    def settle(self, begun: int, before: int) -> None:
        """Charge hookd itself with the time since `begun`, without the time charged or settled since then.

        Args:
            begun: the time at which the training's own code was left, in ns.
            before: the value of `charged` at that time.
        """
        spent = max(0, self.clock() - begun - (self.charged - before))  # another thread may charge meanwhile
        self.spent[OWN] = self.spent.get(OWN, 0) + spent
        self.charged += spent
