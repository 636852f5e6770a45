"""Select the modules to observe, and which of them in this step."""

from __future__ import annotations

from hookd import Context, Module, PluginError

KNOWN_STEPS = 20
"""Steps after which the modules of a training are known."""


class Selector:
    """The options `modules`, `types`, `depth` and `rotate`.

    Attributes:
        selected: the modules that the options name, by their names, in the order in which they were first called.
    """

    def __init__(self, context: Context) -> None:
        self.names, self.types = context.globs("modules"), context.globs("types")
        self.depth = context.option("depth", -1)
        self.rotate = context.option("rotate", default=False)
        if self.depth < -1:
            raise PluginError(f"activations: depth must be 0 or more, or -1 for all modules, not {self.depth}")
        self.selected: dict[str, Module] = {}
        self._order: list[int] = []
        self._index = 0
        self._steps = 0

    def take(self, module: Module) -> bool:
        """Return whether the options name `module`, and remember it if so."""
        is_shallow = self.depth < 0 or module.depth <= self.depth
        is_named, is_of_type = self.names.match(module.name), self.types.match(module.type)
        takes = is_shallow and is_named and is_of_type
        if takes:
            self.selected[module.name] = module
            self._order.append(module.id)
        return takes

    def is_due(self, module: Module) -> bool:
        """Whether `module` is observed in this step: always, unless `rotate` makes modules take turns."""
        return not self.rotate or self._order[self._index % len(self._order)] == module.id

    def next(self) -> None:
        """End a sampled step: the next module has its turn."""
        self._index += 1

    def complaints(self) -> list[str]:
        """End a step; after KNOWN_STEPS steps return, once, a message for each option that selects nothing."""
        self._steps += 1
        if self._steps != KNOWN_STEPS:
            return []
        unmatched = self.names.unmatched("module") + self.types.unmatched("class of a module")
        is_empty = not (unmatched or self.selected) and (self.names.seen or self.types.seen)
        return unmatched or ["modules, types and depth together select no module"] * is_empty
