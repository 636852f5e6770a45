"""Limit the number of kinds of incidents, because each is a series, a label of webhooks, and a word to search for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

OTHER = "other"
"""The kind that stands for all kinds over a limit."""
MOST_OF_TARGET = 64
"""Maximum number of kinds of one target, without hookd's own; a plugin has at most 32."""
MOST_OF_OWNER = 200
"""Maximum number of kinds of all targets of a user."""
MOST = 2000
"""Maximum number of kinds of all users."""
LONGEST = 64
"""Maximum length of a kind, in characters."""
OURS = frozenset({
    OTHER, "nan", "inf", "bundle", "bundle_failed", "refused", "paused", "dead", "saturated", "near_overflow", "vanishing",
    "exploding", "unchanged", "batchnorm_eval", "loss_spike", "diverging", "not_optimized", "no_gradients", "zero_lr",
    "not_cleared", "eval_mode", "out_of_range", "no_step", "no_update", "loss_input", "leak", "option", "quarantine", "plugin_memory", "training_changed", "eval", "hang", "hang_over", "straggler", "straggler_over", "drift", "drift_over", "parted", "parted_over", "lost",
    "corrupt", "dropped", "memory_growth", "memory_growth_over", "slowdown", "slowdown_over",
})  # fmt: skip
"""The kinds of hookd and its plugins, which have no limit. docs/incidents.md explains each."""
FROM_ZERO = (
    "nan", "inf", "exploding", "diverging", "loss_spike", "hang", "straggler", "drift", "lost", "memory_growth", "slowdown"
)  # fmt: skip
"""The kinds that every target has a counter of from the beginning, so that `increase` in Prometheus sees the first incident.
The others, of which few targets have any, have one from the first incident on."""


class Kinds:
    """The kinds in use; thread-safe. An answer for a target never changes while the target is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_owner: dict[int, set[str]] = {}
        self._of_target: dict[tuple[int, int, int], tuple[int, set[str]]] = {}
        self._count = 0

    def bounded(self, owner: int, process: tuple[int, int, int], kind: str) -> str:
        """Return the kind under which an incident counts: its own, or OTHER if there are too many.

        Args:
            owner: the uid of the process.
            process: pid, start ticks, inode of the page.
            kind: as the target reports it.
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
        """Forget all targets except these, and the kinds that none of these has."""
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
