"""The copy of a page that a reader returns. Runs on the tool side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hookd.wire.module_names import described, is_bare

if TYPE_CHECKING:
    from array import array

    from hookd.wire.identity import Identity
    from hookd.wire.incident import Incident, LogLine

Values = tuple[str, ...]


class ModuleEntry(NamedTuple):
    """A module: its name, its class' name, the ordinal of its root."""

    name: str
    type: str
    root: int


class Heartbeat(NamedTuple):
    """The position of a thread. `module` is an id or 0, `phase` one of PHASES, and `events` the number of its events."""

    tid: int
    name: str
    module: int
    events: int
    phase: str
    step: int


class Record(NamedTuple):
    """An event of the recorder; `when` in unix seconds."""

    seq: int
    when: float
    kind: int
    module: int
    step: int
    value: float


class Series(NamedTuple):
    """A series: its label values and its cells."""

    values: Values
    cells: tuple[float, ...]


@dataclass(frozen=True)
class Family:
    """A family in one snapshot.

    A series has `width` cells, see `PageWriter.series`. `values[k]` are the label values of series k, and `first[k]` is the
    index of its first cell in `cells`, which all families of the snapshot share. In a later snapshot of the same reader, the
    family with the same `key` has the same series at the same k, and perhaps more after them, so results that depend only on
    label values can be cached by key.
    """

    name: str
    kind: str
    help: str
    labels: Values
    buckets: tuple[float, ...]
    width: int
    key: tuple[int, int, int]
    values: tuple[Values, ...]
    first: tuple[int, ...]
    cells: array[float]

    @property
    def series(self) -> list[Series]:
        """All series, built in about 2 us each; for thousands of them use `values`, `first` and `cells`."""
        cells, width = self.cells, self.width
        return [
            Series(values, tuple(cells[at : at + width])) for values, at in zip(self.values, self.first, strict=True)
        ]


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of a page. Other snapshots share its containers, so do not modify them."""

    identity: Identity
    state: str
    generation: int
    families: list[Family]
    modules: dict[int, ModuleEntry]
    heartbeats: list[Heartbeat]
    incidents: list[Incident]
    logs: list[LogLine]
    dropped: int

    def described(self, name: str) -> str:
        """Return the name of a module as people read it: see `hookd.wire.module_names.described`."""
        kinds = (module.type for module in self.modules.values() if module.name == name) if is_bare(name) else ()
        return described(name, next(iter(kinds), ""))
