"""Read arrays of tables in a configuration: `[[rule]]`, `[[webhook]]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookd.api.compatibility import nearest
from hookd.errors import ConfigError
from hookd.tool.config.values import as_text

Readers = Mapping[str, Callable[[object], Any]]


def read_tables(
    content: object, name: str, source: str, readers: Readers, problems: list[str]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Read an array of tables.

    Args:
        content: the parsed TOML value.
        name: of the array.
        source: name of the file, for messages.
        readers: of the values, by key; they raise ValueError or ConfigError.
        problems: a message for each mistake is appended.

    Returns:
        For each table its place in the file in words, and its values.
    """
    if not isinstance(content, list) or not all(isinstance(table, Mapping) for table in content):
        problems.append(f"{source}: {name} is not a list of tables; write [[{name}]]")
        return []
    places = [f"{source}: [[{name}]] {n}" for n in range(1, len(content) + 1)]
    return [(where, _read(table, where, readers, problems)) for where, table in zip(places, content, strict=True)]


def _read(table: Mapping[str, object], where: str, readers: Readers, problems: list[str]) -> Mapping[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in readers:
            problems.append(f"{where} has no key '{key}'; {nearest(key, readers)}")
            continue
        try:
            values[key] = readers[key](value)
        except ConfigError as exc:
            problems.append(f"{where} {key}: {exc.message}. {exc.hint}".rstrip(". ") + ".")
        except ValueError as exc:
            problems.append(f"{where} {key}: {value!r} {exc}.")
    return values


def read_texts(value: object) -> dict[str, str]:
    """Return a table of plain values as texts."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError('is not a table of variables; write { NAME = "value" }')
    if any(isinstance(item, (Mapping, list)) for item in value.values()):
        raise ValueError("holds more than plain values")
    return {str(name): as_text(item) for name, item in value.items()}
