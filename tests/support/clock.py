"""A clock that a test moves."""

from __future__ import annotations


class Clock:
    """A clock that stands still until the test moves it.

    Attributes:
        ns: its time.
    """

    def __init__(self) -> None:
        self.ns = 10**15  # far from 0, which stands for "not measured"

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)
