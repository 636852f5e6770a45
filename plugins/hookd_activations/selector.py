"""Which modules are looked at, and which of them in this step. Runs in the target."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hookd import Context, Module, PluginError


class Selector:
    """The options `modules`, `types`, `depth` and `rotate`.

    Attributes:
        selected: the modules that the options name, by their names, in the order in which they were first called.
    """

    def __init__(self, context: Context) -> None:
        self.names = context.option("modules", "*").split("|")
        self.types = context.option("types", "*").split("|")
        self.depth = context.option("depth", -1)
        self.rotate = context.option("rotate", default=False)
        if self.depth < -1:
            raise PluginError(f"activations: depth must be 0 or more, not {self.depth}")
        self.selected: dict[str, Module] = {}
        self._order: list[int] = []
        self._turn = 0

    def take(self, module: Module) -> bool:
        """Say whether the options name `module`, and remember it."""
        is_shallow = self.depth < 0 or module.depth <= self.depth
        takes = is_shallow and _matches(module.name, self.names) and _matches(module.type, self.types)
        if takes:
            self.selected[module.name] = module
            self._order.append(module.id)
        return takes

    def is_due(self, module: Module) -> bool:
        """Whether it is to be looked at in this step: always, unless they take turns."""
        return not self.rotate or self._order[self._turn % len(self._order)] == module.id

    def next(self) -> None:
        """End a step that was looked at."""
        self._turn += 1


def _matches(text: str, globs: list[str]) -> bool:
    return any(fnmatchcase(text, glob) for glob in globs)
