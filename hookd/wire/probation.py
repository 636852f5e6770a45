"""Times at which a quarantined plugin is tried again; each wait on probation is twice the last. Used on both sides."""

from __future__ import annotations


class Probation:
    """The quarantines of one plugin.

    Args:
        first_s: length of the first one, in seconds; 0 means without end.
        most_s: the greatest length, in seconds.

    Attributes:
        until: monotonic seconds at which the quarantine ends; None if there is none, or no end.
        times: number of quarantines in a row, without a probation that was passed.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._wait_s = 0.0
        self._admitted = 0.0
        self.until: float | None = None
        self.times = 0

    def quarantine(self, now: float) -> float:
        """Begin a quarantine and return its length in seconds, 0 for one without end.

        During probation it is twice as long as the last one.
        """
        on_probation = self.is_on(now)
        self.times = self.times + 1 if on_probation else 1
        self._wait_s = min(2 * self._wait_s, self._most_s) if on_probation else self._first_s
        self.until = now + self._wait_s if self._wait_s else None
        return self._wait_s

    def is_over(self, now: float) -> bool:
        """Whether the quarantine has ended."""
        return self.until is not None and now >= self.until

    def admit(self, now: float) -> None:
        """Begin the probation, as long as the quarantine was; one error in it is enough for the next quarantine."""
        self.until, self._admitted = None, now

    def is_on(self, now: float) -> bool:
        """Whether the plugin is on probation."""
        return self._wait_s > 0 and now - self._admitted < self._wait_s
