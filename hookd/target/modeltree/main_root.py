"""The main root of a process, whose modules have bare names, and the names of all other roots.

The main root is the model that is trained: of the roots with parameters it is the one with most parameters that an optimizer
holds or that have a gradient. All other roots are named after their class: `#Discriminator.(root)`. So a name follows from what a module is, and not from the order in
which roots are called: a series belongs to the same module after every attach, and in every rank.

Until an optimizer has stepped, the root with most trainable parameters is taken for the main one. If that turns out to be wrong,
both models are named anew at their next call; it happens in the first step or two, if at all.
"""

from __future__ import annotations

import itertools
import re
import weakref
from typing import TYPE_CHECKING, Any

from hookd.api.passive import children_of, groups_of, modules_in, of_tensor, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

    from hookd.target.modeltree.names import Model

    Weight = tuple[int, int, int]
    """The elements of a root's parameters: trained, trainable, all."""

MOST_MODULES = 4096
"""Number of modules of a root whose parameters are counted. It takes some milliseconds."""
LONGEST_TITLE = 40
"""Longest class name in the name of a root, in characters."""


class MainRoot:
    """Decides which root is the main one.

    Args:
        models: all models of the process.

    Attributes:
        model: the main root's model; None if there is none, or if it is to be learnt again.
        has_new: whether there are new optimizers, and perhaps more to come.
        is_due: whether to call `review`.
    """

    def __init__(self, models: list[Model]) -> None:
        self._models = models
        self.model: Model | None = None
        self.is_due = self.has_new = False
        self._chosen: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref[Any]] = []

    def note_new(self, optimizer: Optimizer) -> None:
        """Record an optimizer that has stepped for the first time."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self.has_new = True

    def note_known(self) -> None:
        """Record that a known optimizer has stepped: by now, all those in the training's loop have."""
        self.has_new, self.is_due = False, True

    def takes_over(self, root: nn.Module) -> bool:
        """Whether a new root is the main one. The current one, if there is one, is then to be named anew."""
        chosen = None if self._chosen is None else self._chosen()
        if chosen is not None:
            return root is chosen
        modules = _modules_in(root)
        if not _has_parameters(modules):  # a loss, a metric, an activation function; or a container of such modules
            return self.model is None and bool(children_of(root))
        if self.model is None or not self.model.alive:
            return True
        optimized = self._optimized()
        ours, theirs = _weight(modules, optimized), _weight(_modules_of(self.model), optimized)
        return ours > theirs or (ours == theirs and type(root).__name__ < self.model.kind.__name__)

    def choose(self, model: Model) -> None:
        """Make a model the main one."""
        self.model, self._chosen = model, None

    def drop(self, model: Model) -> None:
        """Forget a model."""
        if self.model is model:
            self.model = None

    def review(self) -> list[Model]:
        """Look whether another root is the main one; return the models to be named anew."""
        self.is_due = False
        living = [(model, modules) for model in self._models if _has_parameters(modules := _modules_of(model))]
        if len(living) < 2:
            return []
        optimized = self._optimized()
        weights = {model: _weight(modules, optimized) for model, modules in living}
        largest = [model for model, weight in weights.items() if weight == max(weights.values())]
        best = min(largest, key=lambda model: (model.kind.__name__, model is not self.model))
        root = best.live_root
        if best is self.model or root is None:
            return []
        self._chosen = weakref.ref(root)
        return [best] if self.model is None else [self.model, best]

    def _optimized(self) -> set[int]:
        """Return the ids of all parameters that living optimizers hold."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return {id(p) for optimizer in optimizers for group in groups_of(optimizer) for p in group["params"]}


def title_of(root: nn.Module, taken: Iterable[str]) -> str:
    """Return the name of a root that is not the main one: its class, with a number if another root has that name."""
    title = re.sub(r"[^0-9A-Za-z_]", "_", type(root).__name__)[:LONGEST_TITLE] or "_"
    names = itertools.chain([title], (f"{title}-{number}" for number in itertools.count(2)))
    known = set(taken)
    return next(name for name in names if name not in known)


def _modules_in(root: nn.Module) -> list[nn.Module]:
    return [module for _, module in itertools.islice(modules_in(root), MOST_MODULES)]


def _modules_of(model: Model) -> list[nn.Module]:
    """Return the living modules of a model, whose root may be gone: a container is made anew at each step."""
    root = model.live_root
    if root is not None:
        return _modules_in(root)
    named = itertools.islice(list(model.names.values()), MOST_MODULES)
    return [module for one in named if (module := one.torch()) is not None]


def _has_parameters(modules: Iterable[nn.Module]) -> bool:
    return any(parameters_of(module) for module in modules)


def _weight(modules: Iterable[nn.Module], optimized: set[int]) -> Weight:
    trained = trainable = total = 0
    parameters = {id(p): p for module in modules for p in parameters_of(module).values()}
    for key, parameter in parameters.items():
        elements = _elements(parameter)
        total += elements
        trainable += elements if of_tensor(parameter, "requires_grad") else 0
        is_trained = (
            key in optimized or of_tensor(parameter, "grad") is not None
        )  # a GradScaler may skip an optimizer's steps
        trained += elements if is_trained else 0
    return trained, trainable, total


def _elements(parameter: Any) -> int:
    try:
        elements = 1
        for size in of_tensor(parameter, "shape"):
            elements *= size
    except (RuntimeError, TypeError):  # a parameter that is not initialized yet has no shape
        return 0
    return int(elements)
