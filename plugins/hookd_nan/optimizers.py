"""The optimizers of the training, each with a number, and the gradients that each holds."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from hookd import groups_of, peek
from hookd_nan.models import grad_of, named_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context

    GradientsById = dict[int, Tensor]
    """Gradients, by the ids of their parameters."""


def gradients_of(optimizer: Optimizer) -> GradientsById:
    """Return the gradients that an optimizer would use, in its order."""
    return {
        id(parameter): grad
        for group in groups_of(optimizer)
        for parameter in group["params"]
        if (grad := grad_of(parameter)) is not None
    }


class Known(NamedTuple):
    """An optimizer that has stepped."""

    ref: Callable[[], Optimizer | None]
    number: int
    size: int  # number of its parameters


class Optimizers:
    """Numbers the optimizers that step; 0 stands for those that have never stepped.

    Attributes:
        known: the optimizers, by id.
        holders: by a parameter's id: the number of the optimizer that holds it.
        last: the last number.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.known: dict[int, Known] = {}
        self.holders: dict[int, int] = {}
        self.last = 0

    def meet(self, optimizer: Optimizer) -> tuple[int, bool]:
        """Register an optimizer that steps; return its number, and whether it was unknown until now."""
        size = sum([len(group["params"]) for group in groups_of(optimizer)])
        known = self.known.get(id(optimizer))
        if known is not None and known.ref() is not optimizer:  # the id of one that is gone
            known = None
        if known is not None and known.size == size:
            return known.number, False
        if known is None:
            self.last += 1
        number = self.last if known is None else known.number
        self.known[id(optimizer)] = Known(weakref.ref(optimizer), number, size)
        self.holders.update((id(parameter), number) for group in groups_of(optimizer) for parameter in group["params"])
        return number, known is None

    def numbers(self) -> set[int]:
        """Return the numbers of all optimizers, 0 for those that have never stepped."""
        return {0, *self.holders.values()}

    def holder(self, parameter: Tensor) -> int:
        """Return the number of the optimizer that holds a parameter."""
        return self.holders.get(id(parameter), 0)

    def by_optimizer(self) -> dict[int, GradientsById]:
        """Return the gradients of all models by the number of the optimizer that holds them; 0 for no known optimizer."""
        by_number: dict[int, GradientsById] = {}
        for _, parameter, grad in named_gradients(self._context, None):
            by_number.setdefault(self.holder(parameter), {})[id(parameter)] = grad
        return by_number

    def having(self) -> set[int]:
        """Return the numbers of known optimizers whose parameters have gradients, without a search of the models."""
        return {number for _, number, parameters in self._live() if any(grad_of(one) is not None for one in parameters)}

    def live(self) -> list[Optimizer]:
        """Return the optimizers that have stepped and still exist."""
        return [one for known in self.known.values() if (one := known.ref()) is not None]

    def _live(self) -> Iterator[tuple[Optimizer, int, list[Tensor]]]:
        for known in self.known.values():
            optimizer = known.ref()
            if optimizer is not None:
                yield optimizer, known.number, [one for group in groups_of(optimizer) for one in group["params"]]

    def is_used(self, tensor: Tensor) -> bool | None:
        """Whether the training uses a parameter: it has a gradient, or its optimizer has state for it.

        Returns:
            None if unknown: no optimizer has the parameter, or its optimizer has no state, and none of the optimizer's
            parameters has a gradient now.
        """
        if grad_of(tensor) is not None:
            return True
        for optimizer, _, parameters in self._live():
            if any(one is tensor for one in parameters):
                with_state = {id(one) for one in peek(optimizer, "state") or ()}
                if id(tensor) in with_state:
                    return True
                return False if with_state or any(grad_of(one) is not None for one in parameters) else None
        return None
