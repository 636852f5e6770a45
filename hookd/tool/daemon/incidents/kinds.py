"""How many kinds of incidents there may be: each is a series, a label of webhooks, and a word that a person looks for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

OTHER = "other"
"""As what all further kinds count."""
MOST_OF_TARGET = 64
"""Kinds of one target beside hookd's own; a plugin has at most 32."""
MOST_OF_OWNER = 200
"""Kinds of all targets of a user."""
MOST = 2000
"""Kinds of all users."""
LONGEST = 64
"""Characters of a kind."""
OURS = frozenset({
    OTHER, "nan", "inf", "bundle", "bundle_failed", "refused", "paused", "dead", "saturated", "near_overflow", "vanishing",
    "exploding", "unchanged", "batchnorm_eval", "loss_spike", "leak", "option", "quarantine", "plugin_memory",
    "training_changed", "eval", "hang", "hang_over", "straggler", "straggler_over", "drift", "drift_over", "lost",
    "corrupt", "dropped",
})  # fmt: skip
"""Those of hookd and its plugins: there is always room for them. docs/incidents.md explains each."""


class Kinds:
    """The kinds that are known. Any thread may ask; an answer for a target never changes while it is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_owner: dict[int, set[str]] = {}
        self._of_target: dict[tuple[int, int, int], tuple[int, set[str]]] = {}
        self._count = 0

    def bounded(self, owner: int, process: tuple[int, int, int], kind: str) -> str:
        """Return the kind as which an incident counts: itself, or OTHER where there are too many.

        Args:
            owner: the uid of the process.
            process: pid, start ticks, inode of the page.
            kind: as the target tells it.
        """
        if kind in OURS:
            return kind
        if not kind or len(kind) > LONGEST or not kind.isprintable():
            return OTHER
        with self._lock:
            known = self._of_owner.setdefault(owner, set())
            _, mine = self._of_target.setdefault(process, (owner, set()))
            if kind in mine:
                return kind
            if len(mine) >= MOST_OF_TARGET or not self._admit(known, kind):
                return OTHER
            mine.add(kind)
            return kind

    def keep(self, processes: Collection[tuple[int, int, int]]) -> None:
        """Forget all targets but these, and the kinds that none of these has: users that are gone hold no room."""
        with self._lock:
            self._of_target = {one: kinds for one, kinds in self._of_target.items() if one in processes}
            self._of_owner = {}
            for owner, kinds in self._of_target.values():
                self._of_owner.setdefault(owner, set()).update(kinds)
            self._count = sum(map(len, self._of_owner.values()))

    def _admit(self, known: set[str], kind: str) -> bool:
        """Whether there is room for a kind among those of its owner. Locked."""
        if kind in known:
            return True
        if len(known) >= MOST_OF_OWNER or self._count >= MOST:
            return False
        known.add(kind)
        self._count += 1
        return True
