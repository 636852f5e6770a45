"""Parse the schema, which assigns cells to series. Runs on the tool side and does not trust the bytes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hookd.wire.page.layout import MAX_FAMILIES, MAX_MODULES, MAX_SERIES, MAX_TEXT, Declaration, Region
from hookd.wire.page.log import decode, split
from hookd.wire.page.snapshot import Family, ModuleEntry

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

Values = tuple[str, ...]

UNTRUSTED = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that parsing hostile bytes may raise."""

_BATCH = 64  # records decoded at once; limits the memory that a hostile page can take


class Schema:
    """The parsed part of the schema of one generation.

    Methods raise one of UNTRUSTED for malformed records. A later record replaces an earlier one: a writer that was
    interrupted after writing a record, and before noting that it had, writes the record again.
    """

    def __init__(self, generation: int, values: Region) -> None:
        self.generation = generation
        self.parsed = 0  # bytes
        self.end = 0  # number of cells up to the last one in use
        self.families: dict[int, _SeenFamily] = {}
        self.modules: dict[int, ModuleEntry] = {}
        self._first, self._cells = values.offset // 8, values.length // 8
        self._ids: dict[str, int] = {}
        self._series_count = 0
        self._take: dict[str, Callable[..., None]] = {
            "f": self._add_family,
            "-f": self._retire_family,
            "s": self._add_series,
            "-s": self._retire,
            "m": self._add_module,
            "-m": self._retire_module,
        }

    def feed(self, data: bytes) -> None:
        """Parse the bytes appended since the last call, up to the first incomplete record."""
        start, take = self.parsed, self._take
        records = split(data)
        while batch := list(itertools.islice(records, _BATCH)):
            joined = b",".join([payload for payload, _ in batch])
            for tag, *fields in decode(f"[{joined.decode()}]"):
                take[tag](*fields)
            self.parsed = start + batch[-1][1]

    def _add_family(self, family: int, *declared: Any) -> None:
        name, kind, help_text, labels, buckets = declared
        declaration = Declaration(name, kind, _text(help_text), tuple(labels), tuple(map(float, buckets))).check()
        self._retire_family(self._ids.get(name, family))
        _require(type(family) is int and len(self.families) < MAX_FAMILIES)
        self.families[family] = _SeenFamily(declaration, (self.generation, family, 0))
        self._ids[name] = family

    def _retire_family(self, family: int) -> None:
        seen = self.families.pop(family, None)
        if seen:
            del self._ids[seen.declaration.name]
            self._series_count -= len(seen.series)

    def _add_series(self, family: int, cell: int, values: list[str]) -> None:
        seen = self.families[family]
        first = cell - self._first
        end = first + seen.width
        key = tuple([_text(value) for value in values])
        _require(type(cell) is int and first >= 0 and end <= self._cells and len(key) == seen.label_count)
        if key in seen.series:
            self._series_count -= seen.remove(key)
        self._series_count += 1
        _require(self._series_count <= MAX_SERIES)
        seen.series[key] = first
        if end > self.end:  # noqa: PLR1730  three times as fast as max()
            self.end = end

    def _retire(self, family: int, values: list[str]) -> None:
        seen = self.families.get(family)
        if seen:
            self._series_count -= seen.remove(tuple(values))

    def _add_module(self, module: int, name: str, type_name: str, root: int) -> None:
        _require(type(module) is int and type(root) is int and len(self.modules) < MAX_MODULES)
        self.modules[module] = ModuleEntry(_text(name), _text(type_name), root)

    def _retire_module(self, module: int) -> None:
        self.modules.pop(module, None)


class _SeenFamily:
    """The parsed part of a family; maps label values to the index of the first cell."""

    def __init__(self, declaration: Declaration, key: tuple[int, int, int]) -> None:
        self.declaration = declaration
        self.width, self.label_count = declaration.width, len(declaration.labels)
        self.series: dict[Values, int] = {}
        self._key = key
        self._frozen: tuple[tuple[Values, ...], tuple[int, ...]] = ((), ())

    def remove(self, values: Values) -> int:
        """Remove a series; return how many were removed, 1 or 0."""
        if self.series.pop(values, None) is None:
            return 0
        generation, family, removals = self._key
        self._key, self._frozen = (generation, family, removals + 1), ((), ())
        return 1

    def freeze(self, cells: array[float]) -> Family:
        """Return the family as parsed so far, with the cells of one snapshot."""
        if len(self._frozen[0]) != len(self.series):
            self._frozen = (tuple(self.series), tuple(self.series.values()))
        return Family(*self.declaration, self.width, self._key, *self._frozen, cells)


def _require(is_so: bool) -> None:
    if not is_so:
        raise ValueError("a value is out of range, or there are too many")


def _text(value: object) -> str:
    """Return the value if it is a text that UTF-8 can encode."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise TypeError("a value is not a text, or is too long")
    if not value.isascii():
        value.encode()
    return value
