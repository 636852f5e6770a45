"""Keep the series of a gauge in step with a changing set of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd import Gauge


class Shown:
    """The series of one gauge, by owner; a series ends when its owner no longer has it.

    Args:
        most: most series; further ones are left out.
    """

    def __init__(self, gauge: Gauge, most: int | None = None) -> None:
        self._gauge = gauge
        self._most = most
        self._labels: dict[str, set[tuple[str, ...]]] = {}

    def show(self, owner: str, values: Mapping[tuple[str, ...], float]) -> None:
        """Set all series of `owner`, and remove its others."""
        before = self._labels.get(owner, set())
        for labels in before - values.keys():
            self._gauge.remove(*labels)
        kept = self._labels[owner] = before & values.keys()
        for labels, value in values.items():
            if labels in kept or self._has_room():
                kept.add(labels)
                self._gauge.labels(*labels).set(value)

    def _has_room(self) -> bool:
        return self._most is None or sum(map(len, self._labels.values())) < self._most
