"""Find modules that a model keeps in a plain list, tuple or dict, so that its `parameters()` does not have theirs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from hookd import attributes_of, modules_in, parameters_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Parameter

RELIST = 16
"""The containers of a model are looked for again after so many looks at its parameters."""
MOST = 64
"""Items of a container that are examined."""


class Container(NamedTuple):
    """An attribute of a module that is a plain container with modules in it: its path in the model, and what it is in."""

    path: str
    name: str
    owner: weakref.ref[nn.Module]


class Unregistered:
    """The plain containers of one model.

    Attributes:
        ref: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ref = weakref.ref(model)
        self._looks = 0
        self._containers: list[Container] = []

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, Parameter]]:
        """Yield the path of the container, and the parameter, of each parameter that the model has not registered."""
        if self._looks % RELIST == 0:
            self._containers = list(_containers(model))
        self._looks += 1
        registered = {id(parameter) for _, parameter in parameters_in(model)} if self._containers else set()
        for container in self._containers:
            owner = container.owner()
            for module in _modules(attributes_of(owner).get(container.name)) if owner is not None else ():
                yield from ((container.path, p) for _, p in parameters_in(module) if id(p) not in registered)


def _containers(model: nn.Module) -> Iterator[Container]:
    for path, module in modules_in(model):
        for name, value in list(attributes_of(module).items()):
            if name != "_modules" and _modules(value):
                yield Container(f"{path}.{name}".lstrip("."), name, weakref.ref(module))


def _modules(value: Any) -> list[nn.Module]:
    """Return the modules in a plain list, tuple or dict."""
    kind = type(value)
    items = value if kind is list or kind is tuple else list(value.values()) if kind is dict else ()
    return [item for item in items[:MOST] if issubclass(type(item), nn.Module)]
