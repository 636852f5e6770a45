"""The optimizers of the training, each with a number, and the gradients that each holds."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hookd import groups_of, peek
from hookd_nan.models import grad_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd_nan.models import Models

    Held = dict[int, Tensor]
    """Gradients, by the ids of their parameters."""


def _nobody() -> None:
    """Stand in for a reference to an optimizer."""


class Optimizers:
    """Numbers the optimizers that step; 0 stands for those that have never stepped."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[int, tuple[Callable[[], Optimizer | None], int, int]] = {}  # by id: also number and size
        self._holders: dict[int, int] = {}  # by a parameter's id: the number of the optimizer that holds it
        self._last = 0

    def succeed(self, predecessor: Optimizers) -> None:
        """Take over the optimizers of a predecessor, with their numbers."""
        self._known, self._holders, self._last = predecessor._known, predecessor._holders, predecessor._last  # noqa: SLF001

    def meet(self, optimizer: Optimizer) -> tuple[int, bool]:
        """Register an optimizer that steps; return its number, and whether it was unknown until now."""
        size = sum([len(group["params"]) for group in groups_of(optimizer)])
        ref, number, known_size = self._known.get(id(optimizer), (_nobody, 0, 0))
        if ref() is optimizer and known_size == size:
            return number, False
        if ref() is not optimizer:
            number, self._last = self._last + 1, self._last + 1
        self._known[id(optimizer)] = (weakref.ref(optimizer), number, size)
        self._holders.update((id(parameter), number) for group in groups_of(optimizer) for parameter in group["params"])
        return number, ref() is not optimizer

    def numbers(self) -> set[int]:
        """Return the numbers of all optimizers, 0 for those that have never stepped."""
        return {0, *self._holders.values()}

    def holder(self, parameter: Tensor) -> int:
        """Return the number of the optimizer that holds a parameter."""
        return self._holders.get(id(parameter), 0)

    @property
    def knows_any(self) -> bool:
        """Whether any optimizer is known."""
        return bool(self._known)

    @staticmethod
    def held_by(optimizer: Optimizer) -> Held:
        """Return the gradients that an optimizer would use, in its order."""
        return {
            id(parameter): grad
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if (grad := grad_of(parameter)) is not None
        }

    def by_optimizer(self) -> dict[int, Held]:
        """Return the gradients of all models by the number of the optimizer that holds them; 0 for no known optimizer."""
        found: dict[int, Held] = {}
        for _, parameter, grad in self._models.named_gradients(None):
            found.setdefault(self.holder(parameter), {})[id(parameter)] = grad
        return found

    def having(self) -> set[int]:
        """Return the numbers of known optimizers whose parameters have gradients, without a search of the models."""
        live = [(ref(), number) for ref, number, _ in self._known.values()]
        return {
            number
            for optimizer, number in live
            if optimizer is not None
            and any(grad is not None for group in groups_of(optimizer) for grad in map(grad_of, group["params"]))
        }

    def is_used(self, tensor: Tensor) -> bool | None:
        """Whether the training uses a parameter: it has a gradient, or its optimizer has state for it.

        Returns:
            None if unknown: no optimizer has the parameter, or its optimizer has no state, and none of the optimizer's
            parameters has a gradient now.
        """
        if grad_of(tensor) is not None:
            return True
        for ref, _, _ in self._known.values():
            optimizer = ref()
            parameters = [] if optimizer is None else [one for group in groups_of(optimizer) for one in group["params"]]
            if any(one is tensor for one in parameters):
                with_state = {id(one) for one in peek(optimizer, "state") or ()}
                if id(tensor) in with_state:
                    return True
                return False if with_state or any(grad_of(one) is not None for one in parameters) else None
        return None
