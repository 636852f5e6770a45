"""The modules of a target as a tree, with the values of the heat map, from the last copy of its page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.tool.daemon.metrics.selection import FINDINGS
from hookd.wire.module_names import ROOT, split

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hookd.wire.page import Snapshot

MOST_LEVELS = 64
"""Maximum depth; the rest of a deeper name is one label. Real models are not that deep, but a target may claim anything."""
MOST_NODES = 200_000


@dataclass
class Node:
    """A module.

    Attributes:
        name: value of the label `module`.
        label: name shown below its parent.
        type: its class; empty for a container that is never called.
        place: position in the order of the model.
        children: nested modules.
    """

    name: str
    label: str
    type: str = ""
    place: int = 0
    children: list[Node] = field(default_factory=list)


class Tree:
    """All modules of one copy of a page.

    Attributes:
        nodes: modules by name, in the order of the model; a container precedes its first child.
        roots: the outermost modules.
        findings: kinds of problems by module name.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.nodes: dict[str, Node] = {}
        self.roots: list[Node] = []
        for _, entry in sorted(snapshot.modules.items()):
            if self._has_room():
                self._node(entry.name).type = entry.type
        for name in self._measured():
            if self._has_room():
                self._node(name)
        for place, node in enumerate(self.nodes.values()):
            node.place = place
        self.findings = self._found()

    def _has_room(self) -> bool:
        return len(self.nodes) < MOST_NODES

    def _measured(self) -> Iterator[str]:
        """Yield the modules that have series; a loss has an empty name and is not a module."""
        for family in self._snapshot.families:
            if family.labels == ("module",):
                yield from (name for (name,) in family.values if name)

    def _node(self, name: str) -> Node:
        if name in self.nodes:
            return self.nodes[name]
        above, label = parent(name)
        into = None if above is None else self._node(above)
        node = self.nodes[name] = Node(name, label)
        (self.roots if into is None else into.children).append(node)
        return node

    def values(self, family: str) -> dict[str, float]:
        """Return the values of a family by module, including NaN and infinities."""
        found = next((one for one in self._snapshot.families if one.name == family and one.labels == ("module",)), None)
        if found is None:
            return {}
        return {name: found.cells[at] for (name,), at in zip(found.values, found.first, strict=True)}

    def path(self, node: Node) -> list[Node]:
        """Return the modules that contain a module, root first."""
        path: list[Node] = []
        above = parent(node.name)[0]
        while above is not None:
            path.insert(0, self.nodes[above])
            above = parent(above)[0]
        return path

    def _found(self) -> Mapping[str, str]:
        """Return the kinds of problems by module name."""
        found: dict[str, list[str]] = {}
        for family in self._snapshot.families:
            if family.name in FINDINGS and "module" in family.labels and "kind" in family.labels:
                module, kind = family.labels.index("module"), family.labels.index("kind")
                for values, at in zip(family.values, family.first, strict=True):
                    if family.cells[at] > 0 and values[kind] not in found.setdefault(values[module], []):
                        found[values[module]].append(values[kind])
        return {name: ", ".join(kinds) for name, kinds in found.items()}


def parent(name: str) -> tuple[str | None, str]:
    """Split the name of a module into the name of its parent, None for a root, and its name there."""
    prefix, path = split(name)
    if path in ("", ROOT):
        return None, name
    if path.count(".") > MOST_LEVELS:
        cut = sum(map(len, path.split(".", MOST_LEVELS)[:MOST_LEVELS])) + MOST_LEVELS - 1
        return prefix + path[:cut], path[cut + 1 :]
    above, _, label = path.rpartition(".")
    return prefix + (above or ROOT), label or path


def share(spent: Mapping[str, float], roots: list[Node]) -> dict[str, float]:
    """Return the share of each module in the total seconds of all roots."""
    whole = sum(_positive(spent.get(root.name)) for root in roots)
    return {name: _positive(seconds) / whole for name, seconds in spent.items()} if whole else {}


def added(*families: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of families for each module."""
    total: dict[str, float] = {}
    for family in families:
        for name, value in family.items():
            total[name] = total.get(name, 0.0) + value
    return total


def over(values: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
    """Return values divided by counts for each module with a count above 0."""
    return {name: value / counts[name] for name, value in values.items() if counts.get(name, 0) > 0}


def _positive(value: float | None) -> float:
    return value if value is not None and 0 < value < math.inf else 0.0
