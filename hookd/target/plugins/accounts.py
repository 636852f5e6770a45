"""What plugins and hookd itself take of metered steps. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

OWN = -1
"""Stands for hookd itself where plugins have their numbers."""


class Accounts:
    """Adds up what is spent in the step in progress; the governor reads it, and empties it.

    Args:
        clock: ns.

    Attributes:
        clock: the same.
        is_metered: whether the step in progress is one of those in which the time is taken of each plugin, and of all that is not the
            training's own code.
        spent: ns spent in each plugin during a metered step, by the plugin's number, and in hookd itself as `OWN`.
        charged: ns of all that so far.
        calls: of each plugin's hooks during a metered step, by the plugin's number.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.is_metered = False
        self.spent: dict[int, int] = {}
        self.charged = 0
        self.calls: dict[int, int] = {}

    def charge(self, number: int, mark: int) -> int:
        """Add the time since `mark` to what a plugin has spent.

        Returns:
            The time now, ns.
        """
        now = self.clock()
        self.spent[number] = self.spent.get(number, 0) + now - mark
        self.charged += now - mark
        self.calls[number] = self.calls.get(number, 0) + 1
        return now

    def settle(self, begun: int, before: int) -> None:
        """Add to what hookd itself has spent the time since `begun`, without what was charged or settled since.

        Args:
            begun: when the training's own code was left, ns.
            before: what `charged` was then.
        """
        spent = max(0, self.clock() - begun - (self.charged - before))  # another thread may charge meanwhile
        self.spent[OWN] = self.spent.get(OWN, 0) + spent
        self.charged += spent
