"""The results of a bench, tables and bounds, and how they are written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Table:
    """One table that is understood without its context."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n{body}\n"


@dataclass(frozen=True)
class Bound:
    """A promised bound, and the measured value."""

    text: str
    limit: float
    measured: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit

    def row(self) -> list[str]:
        return [self.text, f"{self.limit:.3f}", f"{self.measured:.3f}", "yes" if self.holds else "**no**"]


@dataclass(frozen=True)
class Report:
    """The results of one bench."""

    tables: list[Table]
    bounds: list[Bound] = field(default_factory=list)

    def markdown(self) -> str:
        bounds = Table("Bounds", ["what", "at most", "measured", "holds"], [bound.row() for bound in self.bounds])
        return "\n".join(table.markdown() for table in [*self.tables, *([bounds] if self.bounds else [])])
