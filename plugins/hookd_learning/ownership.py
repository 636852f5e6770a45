"""Compare the parameters that get gradients with those that optimizers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hookd import Context, groups_of, of_tensor, parameters_in, peek
from hookd_learning.samples import beginning
from hookd_learning.unregistered import Unregistered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

EVERY, PATIENCE = 2, 2
"""One sampled step in EVERY looks for parameters that no optimizer has: it goes over all parameters. PATIENCE of them must find some."""
SHOWN = 8
"""Names in an incident."""
ELEMENTS = 16
"""Elements of a parameter by which it is known that code of the training has changed it, without an optimizer."""


class Value(NamedTuple):
    """The first elements of a parameter that has a gradient and no optimizer, at the first look at it.

    The parameter is known by its id and name: torch does not swap a tensor that has a weak reference.
    """

    number: int
    elements: list[float]


class Ownership:
    """Finds parameters without an optimizer, and optimizers without gradients.

    Args:
        see: takes a sample of a finding: kind, what it is about, message, fields.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._looks = 0
        self._values: dict[tuple[str, str], Value] = {}
        self._unregistered: dict[int, Unregistered] = {}

    def step_begins(self, optimizer: Optimizer) -> None:
        """Check whether the optimizer has anything to do."""
        parameters = [p for group in groups_of(optimizer) for p in group["params"]]
        kind = type(optimizer).__name__
        message = ""
        if parameters and all(of_tensor(p, "grad") is None for p in parameters):
            message = f"{kind} has no gradient for any of its {len(parameters)} parameters, so it changes nothing"
            if not self._is_any_in_a_model(parameters):
                message += ": no model that is called has them. Was the model replaced after the optimizer was made?"
            elif not any(of_tensor(p, "requires_grad") for p in parameters):
                message += ": all of them have requires_grad=False"
            else:
                message += ": is the loss detached from the model or computed under no_grad(), or are the gradients cleared before the step?"
        self._see("no_gradients", f"{kind} {id(optimizer)}", message)

    def _is_any_in_a_model(self, parameters: Sequence[Any]) -> bool:
        ids = set(map(id, parameters))
        return any(id(p) in ids for _, module in self._context.models() for _, p in parameters_in(module))

    def step_over(self, optimizers: Sequence[Optimizer]) -> None:
        """Look for parameters with gradients that no optimizer has."""
        self._looks += 1
        if self._looks % EVERY:
            return
        owned = {id(p) for optimizer in optimizers for group in groups_of(optimizer) for p in group["params"]}
        for root, module in self._context.models():
            parameters = list(parameters_in(module))
            left = [(name, p) for name, p in parameters if id(p) not in owned and _is_learning(p)]
            if len(left) == len(parameters) and peek(module, "training") is not True:
                left = []  # gradients only flow through this model: a loss that is a model, an attack on its inputs
            self._compare(root.name, left, len(parameters))
            self._look_for_unregistered(root.name, module, owned)

    def _look_for_unregistered(self, root: str, model: nn.Module, owned: set[int]) -> None:
        unregistered = self._unregistered.get(id(model))
        if unregistered is None or unregistered.ref() is not model:
            unregistered = self._unregistered[id(model)] = Unregistered(model)
        found = [path for path, p in unregistered.parameters(model) if id(p) not in owned and _is_learning(p)]
        message = ""
        if found:
            message = (
                f"{len(found)} parameters in {', '.join(dict.fromkeys(found))} of {self._context.described(root)} get gradients, but no "
                "optimizer has them: a plain list or dict does not register its modules. Use nn.ModuleList or nn.ModuleDict"
            )
        self._see("not_optimized", f"{root} unregistered", message, patience=PATIENCE, module=root, count=len(found))

    def _compare(self, root: str, left: list[tuple[str, Parameter]], count: int) -> None:
        readable = [(name, p) for name, p in left if self._context.is_readable(p)]
        if not readable:
            self._see("not_optimized", root, "", patience=PATIENCE)
            return
        values = [beginning(p, ELEMENTS) for _, p in readable]
        named = [(name, id(p), value.numel()) for (name, p), value in zip(readable, values)]

        def judge(numbers: list[float]) -> None:
            still, at = [], 0
            for name, number, count_of in named:
                value = Value(number, numbers[at : at + count_of])
                at += count_of
                if self._stands_still((root, name), value):
                    still.append(name)
            self._report(root, still, count)

        self._context.later(values, judge)

    def _stands_still(self, key: tuple[str, str], value: Value) -> bool:
        known = self._values.get(key)
        if known is None or known.number != value.number:
            self._values[key] = value
            return True
        return known.elements == value.elements

    def _report(self, root: str, names: list[str], count: int) -> None:
        if not names:
            self._see("not_optimized", root, "", patience=PATIENCE)
            return
        listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        message = (
            f"{len(names)} of {count} parameters of {self._context.described(root)} get gradients, but no optimizer has them, so they "
            f"never change: {listed}. Pass them to the optimizer, or call requires_grad_(False) on them"
        )
        self._see(
            "not_optimized", root, message, patience=PATIENCE, module=root, parameters=names[:SHOWN], count=len(names)
        )

    def clear(self) -> None:
        """Forget the parameters."""
        self._values.clear()
        self._unregistered.clear()


def _is_learning(parameter: Tensor) -> bool:
    return bool(of_tensor(parameter, "requires_grad")) and of_tensor(parameter, "grad") is not None
