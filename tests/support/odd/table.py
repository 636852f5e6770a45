"""The table of odd trainings: each is a function that makes a model, and what takes a step of its training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from tests.support.evidence import Make, Step

TABLE: dict[str, Make] = {}


def odd(make: Make) -> Make:
    """Enter it into the table, by its name."""
    TABLE[make.__name__] = make
    return make


def stepping(
    model: nn.Module, loss: Callable[[int], torch.Tensor], *optimizers: torch.optim.Optimizer
) -> tuple[nn.Module, Step]:
    """Return the ordinary step, given what makes the loss of a step; SGD where no optimizer is given."""
    used = list(optimizers)

    def step(number: int) -> torch.Tensor:
        result = loss(number)
        if not used:  # a lazy module has no parameters before its first call
            used.append(torch.optim.SGD(torch.nn.Module.parameters(model), lr=0.05, momentum=0.9))
        for one in used:
            one.zero_grad()
        result.backward()
        for one in used:
            one.step()
        return torch.Tensor.detach(result).as_subclass(torch.Tensor)

    return model, step


def sgd(
    model: nn.Module, *shape: int, loss: Callable[[Any], torch.Tensor] = lambda y: y.square().mean(), **named: Any
) -> tuple[nn.Module, Step]:
    """Return that step on random inputs of a shape; the fourth has a NaN in it."""
    return stepping(model, lambda number: loss(model(batch(number, *shape), **named)))


def batch(number: int, *shape: int) -> torch.Tensor:
    """Return the inputs of a step."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
    if number == 3:
        x.view(-1)[0] = torch.nan
    return x
