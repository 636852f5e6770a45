"""The main root of a process, whose modules have bare names, and the names of all other roots.

The main root is the model that is trained: of the roots with parameters it is the one of which optimizers hold most. All other
roots are named after their class: `#Discriminator.(root)`. So a name follows from what a module is, and not from the order in
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
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from hookd.target.modeltree.names import Model

    Weight = tuple[int, int, int]
    """The elements of a root's parameters: held by optimizers, trainable, all."""

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
        is_due: whether an optimizer has stepped for the first time since the last `review`.
    """

    def __init__(self, models: list[Model]) -> None:
        self._models = models
        self.model: Model | None = None
        self.is_due = False
        self._chosen: weakref.ref[nn.Module] | None = None
        self._optimizers: list[weakref.ref[Any]] = []

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Record an optimizer that has stepped for the first time."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self.is_due = True

    def takes_over(self, root: nn.Module) -> bool:
        """Whether a new root is the main one. The current one, if there is one, is then to be named anew."""
        chosen = None if self._chosen is None else self._chosen()
        if chosen is not None:
            return root is chosen
        if not _has_parameters(root) and not children_of(root):  # a loss, a metric, an activation function
            return False
        current = None if self.model is None else self.model.live_root
        return current is None or self._is_before(root, current, self._held())

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
        living = [
            (model, root) for model in self._models if (root := model.live_root) is not None and _has_parameters(root)
        ]
        if len(living) < 2:
            return []
        held = self._held()
        best, best_root = living[0]
        for model, root in living[1:]:
            if self._is_before(root, best_root, held) or (
                model is self.model and not self._is_before(best_root, root, held)
            ):
                best, best_root = model, root
        if best is self.model:
            return []
        self._chosen = weakref.ref(best_root)
        return [best] if self.model is None else [self.model, best]

    def _held(self) -> set[int]:
        """Return the ids of all parameters that living optimizers hold."""
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return {id(p) for optimizer in optimizers for group in groups_of(optimizer) for p in group["params"]}

    @staticmethod
    def _is_before(root: nn.Module, other: nn.Module, held: set[int]) -> bool:
        ours, theirs = _weight(root, held), _weight(other, held)
        return ours > theirs or (ours == theirs and type(root).__name__ < type(other).__name__)


def title_of(root: nn.Module, taken: Iterable[str]) -> str:
    """Return the name of a root that is not the main one: its class, with a number if another root has that name."""
    title = re.sub(r"[^0-9A-Za-z_]", "_", type(root).__name__)[:LONGEST_TITLE] or "_"
    names = itertools.chain([title], (f"{title}-{number}" for number in itertools.count(2)))
    known = set(taken)
    return next(name for name in names if name not in known)


def _parameters(root: nn.Module) -> Iterator[Any]:
    for _, module in itertools.islice(modules_in(root), MOST_MODULES):
        yield from parameters_of(module).values()


def _has_parameters(root: nn.Module) -> bool:
    return next(_parameters(root), None) is not None


def _weight(root: nn.Module, held: set[int]) -> Weight:
    in_optimizer = trainable = total = 0
    for key, parameter in {id(p): p for p in _parameters(root)}.items():
        elements = _elements(parameter)
        total += elements
        trainable += elements if of_tensor(parameter, "requires_grad") else 0
        in_optimizer += elements if key in held else 0
    return in_optimizer, trainable, total


def _elements(parameter: Any) -> int:
    try:
        elements = 1
        for size in of_tensor(parameter, "shape"):
            elements *= size
    except (RuntimeError, TypeError):  # a parameter that is not initialized yet has no shape
        return 0
    return int(elements)
