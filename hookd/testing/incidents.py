"""Incidents as tests read them: what hookd says of each by name, what the plugin added in `fields`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.wire.incident import Incident as IncidentOnPage
    from hookd.wire.incident import IncidentRow

_NAMED = frozenset(
    (
        "seq",
        "id",
        "time",
        "last",
        "last_seq",
        "kind",
        "message",
        "plugin",
        "module",
        "step",
        "is_step_absolute",
        "count",
    )
)


@dataclass(frozen=True)
class Incident:
    """An incident that a plugin has reported.

    Attributes:
        kind: the first argument of `context.incident`.
        message: the second one.
        plugin: the plugin that reported it; hookd's own incidents have none.
        module: name of the module concerned, as it was passed to `context.incident`.
        step: the step concerned.
        is_step_absolute: whether `step` counts from the beginning of the training, else from the attach.
        count: how often it has occurred; equal incidents are one.
        fields: all other arguments of `context.incident`, by name, as they are after a round trip through JSON.
    """

    kind: str
    message: str
    plugin: str
    module: str | None
    step: int | None
    is_step_absolute: bool
    count: int
    fields: Mapping[str, Any]

    @classmethod
    def from_page(cls, incident: IncidentOnPage) -> Incident:
        """Convert one that was read from a page."""
        return cls(**_named(incident), count=incident.get("count", 1))


@dataclass(frozen=True)
class StoredIncident(Incident):
    """An incident in the daemon's store.

    Attributes:
        id: its number, for `hookd report '#ID'`; None until it is stored.
        run: the run of the process.
        rank: its rank.
        pid: its pid.
    """

    id: int | None
    run: str
    rank: str
    pid: int

    @classmethod
    def from_row(cls, row: IncidentRow) -> StoredIncident:
        """Convert a row of the store."""
        incident = {**row["detail"], "kind": row["kind"], "message": row["message"], "module": row["module"]}
        named = _named({**incident, "step": row["step"]})
        return cls(**named, count=row["count"], id=row["id"], run=row["run"], rank=row["rank"], pid=row["pid"])


def _named(incident: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kind": incident.get("kind", ""),
        "message": incident.get("message", ""),
        "plugin": incident.get("plugin", ""),
        "module": incident.get("module"),
        "step": incident.get("step"),
        "is_step_absolute": incident.get("is_step_absolute", False),
        "fields": {name: value for name, value in incident.items() if name not in _NAMED},
    }
