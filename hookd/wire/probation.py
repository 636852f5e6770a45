"""When a plugin that was put aside may come back: on probation, and each time after twice as long. In target and daemon."""

from __future__ import annotations


class Probation:
    """The clock of one plugin's quarantines.

    Args:
        first_s: how long the first one lasts, seconds; 0: for ever.
        most_s: how long one lasts at most.

    Attributes:
        until: monotonic seconds at which the quarantine ends; None where there is none.
        times: how often it was put aside, since it was last calm.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._wait_s = 0.0
        self._admitted = 0.0
        self.until: float | None = None
        self.times = 0

    def put_aside(self, now: float) -> float:
        """Begin a quarantine; one on probation gets twice its last. Gives its length in seconds, 0 for one without end."""
        on_probation = self.is_on(now)
        self.times = self.times + 1 if on_probation else 1
        self._wait_s = min(2 * self._wait_s, self._most_s) if on_probation else self._first_s
        self.until = now + self._wait_s if self._wait_s else None
        return self._wait_s

    def is_over(self, now: float) -> bool:
        """Whether a quarantine has lasted long enough."""
        return self.until is not None and now >= self.until

    def admit(self, now: float) -> None:
        """Let it back in: for as long as it was away, one error is enough to put it aside again."""
        self.until, self._admitted = None, now

    def is_on(self, now: float) -> bool:
        """Whether it was let back in, and has not proved itself for as long as it was away."""
        return self._wait_s > 0 and now - self._admitted < self._wait_s
