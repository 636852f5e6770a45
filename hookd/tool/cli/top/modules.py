"""Read the series of a page as lists with one value for each module, in the order in which the agent found them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hookd.wire.module_names import names_above

if TYPE_CHECKING:
    from hookd.wire.page import Family, ModuleEntry, Snapshot

ORIGIN, NONFINITE, FINDING = "hookd_nan_origin", "hookd_nan_nonfinite", "hookd_activations_finding"
_KINDS = {"nan": "NaN", "inf": "Inf"}


class Finding(NamedTuple):
    """A finding on a module: a word for a column, and a text with place and count."""

    short: str
    text: str


class Modules:
    """The modules of one page, across readings.

    Attributes:
        names: of the modules; the index of a name is the module's row.
        types: names of their classes.
        parents: the row of each module's parent, -1 for a root.
        age: grows when rows change; values that were kept by row are invalid then.
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
        """Set the copy of the page to which all other methods refer."""
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
        return next((self._rows[parent] for parent in names_above(name) if parent in self._rows), -1)

    def has(self, family: str) -> bool:
        """Whether the page has series of a family."""
        return family in self._families and bool(self._families[family].first)

    def column(self, name: str, missing: float = math.nan) -> list[float]:
        """Return the value of each module in a family whose only label is `module`; `missing` without one."""
        family = self._families.get(name)
        rows = self._placed(family) if family is not None and family.labels == ("module",) else []
        values = [missing] * len(self.names)
        if family is not None:
            cells = family.cells
            for row, at in zip(rows, family.first, strict=False):
                values[row] = cells[at]
        return values

    def _placed(self, family: Family) -> list[int]:
        """Return the row of each series; cached, since label values rarely change."""
        key, count, rows = self._places.get(family.name, ((-1, -1, -1), 0, []))
        if key != family.key or count > len(family.values):
            rows = []
        rows = rows + [self._row(values[0]) for values in family.values[len(rows) :]]
        self._places[family.name] = (family.key, len(rows), rows)
        return rows

    def findings(self) -> dict[int, Finding]:
        """Return the findings of the modules, by row."""
        findings: dict[int, list[Finding]] = {}
        born = set()
        for labels, value in self._present(ORIGIN):
            row = self._row(labels["module"])
            born.add(row)
            first = f"first {_kind(labels)}"
            text = f"{'' if value == 1 else 'perhaps '}{first} ({labels['where']})"
            findings.setdefault(row, []).append(Finding(first if value == 1 else first + "?", text))
        for labels, value in self._present(NONFINITE):
            row = self._row(labels["module"])
            if row not in born:
                kind = _kind(labels)
                findings.setdefault(row, []).append(Finding(kind, f"{kind} ({labels['where']}) {value:.0f}x"))
        for labels, _ in self._present(FINDING):
            findings.setdefault(self._row(labels["module"]), []).append(Finding(labels["kind"], labels["kind"]))
        return {
            row: Finding(", ".join(dict.fromkeys(part.short for part in parts)), ", ".join(part.text for part in parts))
            for row, parts in findings.items()
        }

    def _present(self, name: str) -> list[tuple[dict[str, str], float]]:
        family = self._families.get(name)
        if family is None or not {"module", "kind"} <= set(family.labels):
            return []
        if name != FINDING and "where" not in family.labels:
            return []
        series = [(values, family.cells[at]) for values, at in zip(family.values, family.first, strict=True)]
        return [(dict(zip(family.labels, values, strict=True)), value) for values, value in series if value > 0]


def _kind(labels: dict[str, str]) -> str:
    return _KINDS.get(labels["kind"], labels["kind"])
