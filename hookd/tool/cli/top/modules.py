"""What a page says of each module, as lists: one value for each module, in the order in which the agent met them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hookd.wire.module_names import above

if TYPE_CHECKING:
    from hookd.wire.page import Family, ModuleEntry, Snapshot

ORIGIN, NONFINITE, FINDING = "hookd_nan_origin", "hookd_nan_nonfinite", "hookd_activations_finding"
_KINDS = {"nan": "NaN", "inf": "Inf"}


class Finding(NamedTuple):
    """What is wrong with a module: in a word for a column, and with where and how often."""

    short: str
    whole: str


class Modules:
    """The modules of one page, reading after reading.

    Attributes:
        names: of the modules; the index of a name is the module's row.
        types: of their classes.
        parents: the row of the module that each is in, -1 for a root.
        age: grows when rows were taken away: what was kept by row is worth nothing then.
    """

    def __init__(self) -> None:
        self.age = 0
        self._families: dict[str, Family] = {}
        self._forget()

    def _forget(self) -> None:
        self.names: list[str] = []
        self.types: list[str] = []
        self.parents: list[int] = []
        self._rows: dict[str, int] = {}
        self._seen: dict[int, ModuleEntry] = {}
        self._places: dict[str, tuple[tuple[int, int, int], int, list[int]]] = {}

    def take(self, snapshot: Snapshot) -> None:
        """Take a copy of the page: all else is about the last one."""
        self._families = {family.name: family for family in snapshot.families if "module" in family.labels}
        if snapshot.modules == self._seen:
            return
        if any(snapshot.modules.get(number) != entry for number, entry in self._seen.items()):
            self.age += 1
            self._forget()
        before = len(self.names)
        for number, entry in sorted(snapshot.modules.items()):
            if number not in self._seen:
                self._row(entry.name, entry.type)
        self.parents[before:] = map(self._parent, self.names[before:])
        self._seen = dict(snapshot.modules)

    def _row(self, name: str, kind: str = "") -> int:
        row = self._rows.setdefault(name, len(self.names))
        if row == len(self.names):
            self.names.append(name)
            self.types.append(kind)
            self.parents.append(-1)
        return row

    def _parent(self, name: str) -> int:
        return next((self._rows[one] for one in above(name) if one in self._rows), -1)

    def has(self, family: str) -> bool:
        """Tell whether the page has series of a family."""
        return family in self._families and bool(self._families[family].first)

    def column(self, name: str, missing: float = math.nan) -> list[float]:
        """Give the value of each module in a family whose only label is `module`; `missing` where it has none."""
        family = self._families.get(name)
        rows = self._placed(family) if family is not None and family.labels == ("module",) else []
        values = [missing] * len(self.names)
        if family is not None:
            cells = family.cells
            for row, at in zip(rows, family.first, strict=False):
                values[row] = cells[at]
        return values

    def _placed(self, family: Family) -> list[int]:
        """Give the row of each series; kept, for label values change seldom."""
        key, count, rows = self._places.get(family.name, ((-1, -1, -1), 0, []))
        if key != family.key or count > len(family.values):
            rows = []
        rows = rows + [self._row(values[0]) for values in family.values[len(rows) :]]
        self._places[family.name] = (family.key, len(rows), rows)
        return rows

    def findings(self) -> dict[int, Finding]:
        """Say what is wrong with a module, by its row."""
        told: dict[int, list[Finding]] = {}
        born = set()
        for labels, value in self._present(ORIGIN):
            row = self._row(labels["module"])
            born.add(row)
            first = f"first {_kind(labels)}"
            whole = f"{'' if value == 1 else 'perhaps '}{first} ({labels['where']})"
            told.setdefault(row, []).append(Finding(first if value == 1 else first + "?", whole))
        for labels, value in self._present(NONFINITE):
            row = self._row(labels["module"])
            if row not in born:
                kind = _kind(labels)
                told.setdefault(row, []).append(Finding(kind, f"{kind} ({labels['where']}) {value:.0f}x"))
        for labels, _ in self._present(FINDING):
            told.setdefault(self._row(labels["module"]), []).append(Finding(labels["kind"], labels["kind"]))
        return {
            row: Finding(", ".join(dict.fromkeys(one.short for one in found)), ", ".join(one.whole for one in found))
            for row, found in told.items()
        }

    def _present(self, name: str) -> list[tuple[dict[str, str], float]]:
        family = self._families.get(name)
        if family is None or not {"module", "kind"} <= set(family.labels):
            return []
        if name != FINDING and "where" not in family.labels:
            return []
        found = [(values, family.cells[at]) for values, at in zip(family.values, family.first, strict=True)]
        return [(dict(zip(family.labels, values, strict=True)), value) for values, value in found if value > 0]


def _kind(labels: dict[str, str]) -> str:
    return _KINDS.get(labels["kind"], labels["kind"])
