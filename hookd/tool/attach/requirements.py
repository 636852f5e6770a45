"""Read the requirements of a plugin's distribution, without importing them.

Only pure Python can be sent to a target. The target has torch, and the payload has hookd and pluggy. All other declared
requirements are sent, and theirs recursively.
"""

from __future__ import annotations

import csv
import importlib.metadata
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hookd.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import Distribution

THERE = frozenset({"hookd", "pluggy", "torch"})
"""Distributions that are not sent, because the target or the payload has them."""
COMPILED = (".so", ".pyd", ".dylib")


def sources(plugin: str, distribution: Distribution) -> dict[str, bytes]:
    """Return the Python files of all requirements of a plugin's distribution, by path.

    Raises:
        PluginError: one of them is not installed here, has compiled code, or a file of it is missing; the message names it.
    """
    files: dict[str, bytes] = {}
    if distribution.name in THERE:  # hookd's own plugins do not need the requirements of its daemon
        return files
    for name in sorted(_required(plugin, distribution)):
        files.update(_files(plugin, importlib.metadata.distribution(name)))
    return files


def _required(plugin: str, distribution: Distribution) -> set[str]:
    """Return the names of all requirements, recursively."""
    required: set[str] = set()
    todo = [distribution]
    while todo:
        for name in _named(plugin, todo.pop()):
            if name not in required:
                required.add(name)
                try:
                    todo.append(importlib.metadata.distribution(name))
                except importlib.metadata.PackageNotFoundError:
                    raise PluginError(
                        f"plugin '{plugin}' requires {name}, which is not installed beside hookd"
                    ) from None
    return required


def _named(plugin: str, distribution: Distribution) -> Iterator[str]:
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415  25 ms, for plugins from elsewhere

    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement as exc:
            raise PluginError(f"plugin '{plugin}': {distribution.name} requires {text!r}, which is not valid") from exc
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in THERE and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            yield name


def _files(plugin: str, distribution: Distribution) -> dict[str, bytes]:
    """Return the Python files of one distribution."""
    who = f"{distribution.name} {distribution.version}, which plugin '{plugin}' requires,"
    files: dict[str, bytes] = {}
    for path in _recorded(distribution):
        if path.suffix in COMPILED:
            raise PluginError(
                f"{who} cannot be carried into a target: {path} is compiled code", hint="Only Python can."
            )
        if path.suffix == ".py" and ".." not in path.parts:
            try:
                files[path.as_posix()] = Path(str(distribution.locate_file(path))).read_bytes()
            except OSError as exc:
                raise PluginError(f"{who} cannot be carried into a target: {path} is missing") from exc
    if not files:
        raise PluginError(f"{who} cannot be carried into a target: no Python file of it is recorded as installed",
                          hint="An editable installation records none.")  # fmt: skip
    return files


def _recorded(distribution: Distribution) -> list[PurePosixPath]:
    """Return all recorded files, including missing ones: `Distribution.files` leaves those out since 3.12."""
    record = distribution.read_text("RECORD")
    if record is None:
        return [PurePosixPath(str(path)) for path in distribution.files or ()]
    return [PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row]
