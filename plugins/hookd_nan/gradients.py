"""Find the gradients and parameters of whole models, and name the bad ones."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hookd import buffers_of, groups_of, modules_in, parameters_in, parameters_of, peek
from hookd_nan.scan import is_bad, own_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context, Module
    from hookd_nan.judge import Details, Event
    from hookd_nan.scan import Scan

Held = dict[int, "Tensor"]
"""Gradients, by the ids of their parameters."""
_grad: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # bypasses a `grad` that a class of parameters defines


def _nobody() -> None:
    """Stand in for a reference to an optimizer."""


class Gradients:
    """Finds and names gradients, and numbers the optimizers.

    Where a method takes an optimizer, None stands for all models that are called.
    """

    def __init__(self, context: Context, scan: Scan) -> None:
        self._context, self._scan = context, scan
        self._optimizers: dict[int, tuple[Callable[[], Optimizer | None], int, int]] = {}  # by id
        self._holders: dict[int, int] = {}  # by a parameter's id: the number of the optimizer that holds it
        self._last = 0

    def succeed(self, predecessor: Gradients) -> None:
        """Take over the optimizers of a predecessor, with their numbers."""
        self._optimizers, self._holders = predecessor._optimizers, predecessor._holders  # noqa: SLF001
        self._last = predecessor._last  # noqa: SLF001

    def meet(self, optimizer: Optimizer) -> tuple[int, bool]:
        """Register an optimizer that steps; return its number, and whether it was unknown until now."""
        size = sum([len(group["params"]) for group in groups_of(optimizer)])
        ref, number, known_size = self._optimizers.get(id(optimizer), (_nobody, 0, 0))
        if ref() is optimizer and known_size == size:
            return number, False
        if ref() is not optimizer:
            number, self._last = self._last + 1, self._last + 1
        self._optimizers[id(optimizer)] = (weakref.ref(optimizer), number, size)
        self._holders.update((id(parameter), number) for group in groups_of(optimizer) for parameter in group["params"])
        return number, ref() is not optimizer

    def numbers(self) -> set[int]:
        """Return the numbers of all optimizers, 0 for those that have never stepped."""
        return {0, *self._holders.values()}

    @property
    def knows_any(self) -> bool:
        """Whether any optimizer is known."""
        return bool(self._optimizers)

    @staticmethod
    def held_by(optimizer: Optimizer) -> Held:
        """Return the gradients that an optimizer would use, in its order."""
        return {
            id(parameter): grad
            for group in groups_of(optimizer)
            for parameter in group["params"]
            if (grad := _grad(parameter)) is not None
        }

    def by_optimizer(self) -> dict[int, Held]:
        """Return the gradients of all models by the number of the optimizer that holds them; 0 for no known optimizer."""
        found: dict[int, Held] = {}
        for _, parameter, grad in self._named(None):
            found.setdefault(self._holders.get(id(parameter), 0), {})[id(parameter)] = grad
        return found

    def having(self) -> set[int]:
        """Return the numbers of known optimizers whose parameters have gradients, without a search of the models."""
        live = [(ref(), number) for ref, number, _ in self._optimizers.values()]
        return {
            number
            for optimizer, number in live
            if optimizer is not None
            and any(grad is not None for group in groups_of(optimizer) for grad in map(_grad, group["params"]))
        }

    def blamed(self, event: Event, optimizer: Optimizer | None) -> Event:
        """Return the event with the last bad gradient in the model's order: the first one in the order of the backward.

        Args:
            event: the event, with the number of its optimizer.
            optimizer: that optimizer if it is stepping now, else None.
        """
        named = self._named(optimizer)
        if optimizer is None:
            named = (one for one in named if self._holders.get(id(one[1]), 0) == event.optimizer)
        bad = [found for found in named if self._scan([found[2]])]
        if not bad:
            return event
        name, parameter, tensor = bad[-1]
        owner, own_name = _owner(name)
        if self._scan([parameter]):
            event, tensor = replace(event, where="param", since=event.own_since), parameter
        details: Details = {"parameter": own_name, **self._scan.counts(tensor)}
        return replace(event, kind=str(self._scan([tensor])), module=owner, details=details)

    def blamed_late(self, event: Event, holders: list[int]) -> Event:
        """Return an event whose values have come from a device, with the last bad gradient in the model's order.

        Args:
            event: the event; its `bad` has the positions of the bad gradients among those checked.
            holders: the ids of the parameters whose gradients were checked.
        """
        bad = {holders[at] for at in event.bad}
        names = [name for root in self._context.roots() for name, one in named_parameters(root) if id(one) in bad]
        if not names:
            return event
        owner, own_name = _owner(names[-1])
        return replace(event, module=owner).having(parameter=own_name)

    def _named(self, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield names, parameters and gradients in the model's order."""
        found: Iterable[tuple[str, Tensor]]
        if optimizer is not None:
            found = self._context.ordered_parameters(optimizer)
        else:
            found = [one for root in self._context.roots() for one in named_parameters(root)]
        for name, parameter in found:
            grad = _grad(parameter)
            if grad is not None:
                yield name, parameter, grad

    def blamed_parameter(self, event: Event, root: Module) -> Event:
        """Return the event with the first bad parameter of a model, if there is one."""
        called = self._called()
        for name, module in _modules(root):
            event = self._blamed_own(event, name, parameters_of(module), is_called=name in called)
            if event.where == "param":
                return replace(event, is_certain=True)
        return event

    def blamed_update(self, event: Event, *, is_seen: bool) -> Event:
        """Return the event with the first parameter that unchecked gradients have made bad, and the number of them.

        Args:
            event: the first bad value that was found.
            is_seen: the gradients of the last step were checked. Then the step is unknown: a parameter that went bad
                earlier need not have been used since.
        """
        named = [one for root in self._context.roots() for one in named_parameters(root)]
        bad = [(name, parameter) for name, parameter in named if self._scan.trained([parameter])]
        if not bad:
            return event
        if event.where != "param":
            name, parameter = bad[0]
            owner, own_name = _owner(name)
            details: Details = {"parameter": own_name, **self._scan.counts(parameter)}
            kind = self._scan.trained([parameter])
            event = replace(event, where="param", module=owner, kind=kind, is_certain=True, details=details)
        event = replace(event, since=0).having(gradients="unknown", bad_parameters=len(bad), last_bad=bad[-1][0])
        return event if is_seen else event.having(since_if_used=event.own_since)

    def blamed_buffer(self, event: Event, root: Module) -> Event:
        """Return the event of a bad output with a bad buffer of a module that may be the origin.

        The call of a module in training may have written the buffer itself, so there it is mentioned, and not blamed.
        """
        names = {event.module, *event.details.get("or_in", ())}
        for name, module in _modules(root):
            buffers = own_tensors(module)[1] if name in names else {}
            is_training = peek(module, "training") is True
            if is_training and name == event.module:
                bad = [own_name for own_name, tensor in buffers.items() if self._scan([tensor], masks=True)]
                event = event.having(buffer=bad[0]) if bad else event
            elif not is_training:
                event = self._blamed_own(event, name, buffers)
                if event.where == "param":
                    return event
        return event

    def blamed_below(self, event: Event) -> Event:
        """Return the event with a bad tensor of a module inside its module, whose code may use it without a call.

        Some bad tensors are mentioned, and not blamed: if the training has continued since (values on a device), because
        the tensor may have gone bad later; tensors elsewhere in the model; and an infinity in a buffer, which may be a
        legitimate value.
        """
        module, called, below = self._module(event.module), self._called(), set[int]()
        container = event.module
        for path, inner in modules_in(module) if module is not None else ():
            below.add(id(inner))
            name = _within(container, path)
            is_called = not path or name in called
            parameters, buffers = _own(inner, is_called=is_called)
            if event.is_late:
                if is_bad(self._scan([*parameters.values(), *buffers.values()], masks=True)):
                    return event.having(parameters="unknown")
                continue
            event = self._blamed_own(event, name, parameters, is_called=is_called)
            if event.where != "param":
                event = self._blamed_own(event, name, buffers, is_called=False, within=container)
            if event.where == "param":
                return event
        return event if event.is_late else self._with_others(event, below, called)

    def _with_others(self, event: Event, below: set[int], called: set[str]) -> Event:
        """Return the event with a bad tensor elsewhere in the model, which the module's code may use by a reference."""
        roots = (root for root in self._context.roots() if any(name == event.module for name, _ in _modules(root)))
        for name, module in (one for root in roots for one in _modules(root)):
            if id(module) in below:
                continue
            for kind, own in zip(("parameter", "buffer"), _own(module, is_called=name in called)):
                bad = [own_name for own_name, tensor in own.items() if self._is_nan(tensor)]
                if bad:
                    return event.having(elsewhere=f"{name} {kind} {bad[0]}")
        return event

    def _is_nan(self, tensor: Tensor) -> bool:
        return self._scan([tensor], masks=True) == "nan" and self._is_used(tensor) is not False

    def _called(self) -> set[str]:
        """Return the names of the modules that have returned in this outermost call."""
        return {returned.module.name for returned in self._context.returned()}

    def _is_used(self, tensor: Tensor) -> bool | None:
        """Whether the training uses a parameter: it has a gradient, or its optimizer has state for it.

        Returns:
            None if unknown: no optimizer has the parameter, or its optimizer has no state, and none of the optimizer's
            parameters has a gradient now.
        """
        if _grad(tensor) is not None:
            return True
        for ref, _, _ in self._optimizers.values():
            optimizer = ref()
            parameters = [] if optimizer is None else [one for group in groups_of(optimizer) for one in group["params"]]
            if any(one is tensor for one in parameters):
                with_state = {id(one) for one in peek(optimizer, "state") or ()}
                if id(tensor) in with_state:
                    return True
                return False if with_state or any(_grad(one) is not None for one in parameters) else None
        return None

    def _module(self, name: str) -> torch.nn.Module | None:
        found = (one for root in self._context.roots() for known, one in _modules(root) if known == name)
        return next(found, None)

    def _blamed_own(
        self, event: Event, name: str, own: Mapping[str, Tensor], *, is_called: bool = True, within: str = ""
    ) -> Event:
        """Return the event of a bad output with the first bad tensor of a module; `where` is "param" if there is one.

        Args:
            event: the event of a bad output.
            name: name of the module.
            own: its parameters, or its buffers.
            is_called: the module was called. If not, an unused tensor is not blamed, and one that may be unused is
                blamed with `if_used_in`.
            within: for buffers of a module inside the event's module, the name of the latter: an infinity in them is
                mentioned, and not blamed. "": it is blamed.
        """
        for own_name, tensor in own.items():
            found = self._scan([tensor], masks=True) or self._scan.trained([tensor])
            if not found or not isinstance(found, str):
                continue
            is_used = True if is_called else self._is_used(tensor)
            if is_used is False:
                continue
            if within and found == "inf":
                event = replace(event, details={"buffer": f"{name} {own_name}", **event.details})
                continue
            details: Details = {"parameter": own_name, **self._scan.counts(tensor)}
            if is_used is None:
                details["if_used_in"] = event.module
            since = event.own_since
            return replace(event, where="param", module=name, kind=found, since=since, details=details)
        return event


def _own(module: torch.nn.Module, *, is_called: bool) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the parameters of a module, and its buffers unless the call may have written them."""
    is_written = is_called and peek(module, "training") is True
    return parameters_of(module), {} if is_written else buffers_of(module)


def _modules(root: Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model with their names."""
    model = root.torch()
    for path, module in modules_in(model) if model is not None else ():
        yield _within(root.name, path), module


def _within(name: str, path: str) -> str:
    """Return the name of the module at a path inside a named module; "" is the module itself."""
    if not path:
        return name
    return f"{_prefix(name)}{path}" if name.endswith("(root)") else f"{name}.{path}"


def named_parameters(root: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model with their names; none if the model is gone."""
    model = root.torch()
    if model is not None:
        for name, parameter in parameters_in(model):
            yield f"{_prefix(root.name)}{name}", parameter


def _owner(name: str) -> tuple[str, str]:
    """Return the name of the module that owns a parameter, and the parameter's name in it."""
    owner, _, own_name = name.rpartition(".")
    if owner.startswith("#") or not owner:
        owner = f"{owner}.(root)".lstrip(".")
    return owner, own_name


def _prefix(root: str) -> str:
    """Return the prefix of the names of a root's modules, given the name of the root."""
    return root[: -len("(root)")]
