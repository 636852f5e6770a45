"""The models of the training, with the names of their modules and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd import modules_in, name_within, parameters_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context, Module

grad_of: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # bypasses a `grad` that a class of parameters defines


def module_named(context: Context, name: str) -> torch.nn.Module | None:
    """Return the module of a name, None if it is gone."""
    return next((module for root, _ in context.models() for known, module in modules(root) if known == name), None)


def all_parameters(context: Context) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all models with their names."""
    for root, _ in context.models():
        yield from named_parameters(root)


def named_gradients(context: Context, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names, parameters and gradients in the models' order: those of an optimizer, or all."""
    named: Iterable[tuple[str, Tensor]] = (
        all_parameters(context) if optimizer is None else context.ordered_parameters(optimizer)
    )
    for name, parameter in named:
        grad = grad_of(parameter)
        if grad is not None:
            yield name, parameter, grad


def modules(root: Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model with their names; none if the model is gone."""
    model = root.torch()
    for path, module in modules_in(model) if model is not None else ():
        yield name_within(root.name, path), module


def named_parameters(root: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model with their names; none if the model is gone."""
    model = root.torch()
    for name, parameter in parameters_in(model) if model is not None else ():
        yield name_within(root.name, name), parameter
