"""The models of the training, with the names of their modules and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd import modules_in, parameters_in

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
        yield within(root.name, path), module


def named_parameters(root: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model with their names; none if the model is gone."""
    model = root.torch()
    for name, parameter in parameters_in(model) if model is not None else ():
        yield f"{_prefix(root.name)}{name}", parameter


def within(name: str, path: str) -> str:
    """Return the name of the module at a path inside a named module; "" is the module itself."""
    if not path:
        return name
    return f"{_prefix(name)}{path}" if name.endswith("(root)") else f"{name}.{path}"


def owner_of(name: str) -> tuple[str, str]:
    """Return the name of the module that owns a parameter, and the parameter's name in it."""
    owner, _, own_name = name.rpartition(".")
    if owner.startswith("#") or not owner:
        owner = f"{owner}.(root)".lstrip(".")
    return owner, own_name


def _prefix(root: str) -> str:
    """Return the prefix of the names of a root's modules, given the name of the root."""
    return root[: -len("(root)")]
