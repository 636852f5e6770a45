"""Find the tensor to blame for a bad value: an output of an earlier call, a gradient, a parameter or a buffer."""

from __future__ import annotations

from dataclasses import replace
from itertools import dropwhile, islice
from typing import TYPE_CHECKING

from hookd import buffers_of, children_of, modules_in, name_within, owner_of, parameters_of, peek
from hookd_nan.models import all_parameters, module_named, modules, named_gradients
from hookd_nan.scan import is_bad, own_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from hookd import Context, Module, Returned
    from hookd_nan.judge import Details, Event
    from hookd_nan.optimizers import Optimizers
    from hookd_nan.scan import Scan


class Blame:
    """Returns events of bad values with the tensor to blame, or as they were if there is none."""

    def __init__(self, context: Context, scan: Scan, optimizers: Optimizers) -> None:
        self._context, self._scan, self._optimizers = context, scan, optimizers

    def gradient(self, event: Event, optimizer: Optimizer | None) -> Event:
        """Return the event with the last bad gradient in the model's order: the first one in the order of the backward.

        Args:
            event: the event, with the number of its optimizer.
            optimizer: that optimizer if it is stepping now, else None.
        """
        named = list(named_gradients(self._context, optimizer))
        if optimizer is None:
            named = [one for one in named if self._optimizers.holder(one[1]) == event.optimizer]
        bad = [one for one in named if self._scan([one[2]])]
        if not bad:
            return event
        name, parameter, tensor = bad[-1]
        if self._scan([parameter]):
            event, tensor = replace(event, where="param", since=event.own_since), parameter
        event = self._with_named(event, name, tensor, str(self._scan([tensor])))
        owners, bad_owners = ([owner_of(name)[0] for name, _, _ in ones] for ones in (named, bad))
        has_spread = bad_owners[0] != event.module or owners[0] == event.module
        return self._with_next(event, set(owners)) if has_spread and event.where == "grad" else event

    def _with_next(self, event: Event, owners: set[str]) -> Event:
        """Return the event of a bad gradient with the other modules in whose backward it may have been born.

        These are the modules that follow in the model's order, down to the next one with gradients, which are good.

        Args:
            event: names the last module in the model's order with a bad gradient.
            owners: the modules with gradients.
        """
        others: list[str] = []
        following = dropwhile(lambda one: one[0] != event.module, self._leaves())
        for name, _ in islice(following, 1, None):
            others.append(name)
            if name in owners:
                break
        return event.having(or_in=others) if others else event

    def _leaves(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all models that contain no others, with their names, in the models' order."""
        named = (one for root, _ in self._context.models() for one in modules(root))
        return ((name, module) for name, module in named if not children_of(module))

    def _with_named(self, event: Event, name: str, tensor: Tensor, kind: str) -> Event:
        """Return the event with a bad tensor, given its name in the model."""
        owner, own_name = owner_of(name)
        return replace(event, module=owner, kind=kind, details={"parameter": own_name, **self._scan.counts(tensor)})

    def late_gradient(self, event: Event, holders: list[int]) -> Event:
        """Return an event whose values have come from a device, with the last bad gradient in the model's order.

        Args:
            event: the event; its `bad` has the positions of the bad gradients among those checked.
            holders: the ids of the parameters whose gradients were checked.
        """
        bad = {holders[at] for at in event.bad}
        names = [name for name, parameter in all_parameters(self._context) if id(parameter) in bad]
        if not names:
            return event
        owner, own_name = owner_of(names[-1])
        return replace(event, module=owner).having(parameter=own_name)

    def parameter(self, event: Event, root: Module) -> Event:
        """Return the event with the first bad parameter of a model, if there is one."""
        called = self._called()
        for name, module in modules(root):
            event = self._blamed_own(event, name, parameters_of(module), is_called=name in called)
            if event.where == "param":
                return replace(event, is_certain=True)
        return event

    def update(self, event: Event, *, is_seen: bool) -> Event:
        """Return the event with the first parameter that unchecked gradients have made bad, and the number of them.

        Args:
            event: the first bad value that was found.
            is_seen: the gradients of the last step were checked. Then the step is unknown: a parameter that went bad
                earlier need not have been used since.
        """
        named = all_parameters(self._context)
        bad = [(name, parameter) for name, parameter in named if self._scan.trained([parameter])]
        if not bad:
            return event
        if event.where != "param":
            name, parameter = bad[0]
            event = self._with_named(event, name, parameter, self._scan.trained([parameter]))
            event = replace(event, where="param", is_certain=True)
        event = replace(event, since=0).having(gradients="unknown", bad_parameters=len(bad), last_bad=bad[-1][0])
        return event if is_seen else event.having(since_if_used=event.own_since)

    def buffer(self, event: Event, root: Module) -> Event:
        """Return the event of a bad output with a bad buffer of a module that may be the origin.

        The call of a module in training may have written the buffer itself, so there it is mentioned, and not blamed.
        """
        names = {event.module, *event.details.get("or_in", ())}
        for name, module in modules(root):
            buffers = own_tensors(module)[1] if name in names else {}
            is_training = peek(module, "training") is True
            if is_training and name == event.module:
                bad = [own_name for own_name, tensor in buffers.items() if self._scan([tensor], masks=True)]
                event = event.having(buffer=bad[0]) if bad else event
            elif not is_training:
                event = self._blamed_own(event, name, buffers, are_buffers=True)
                if event.where == "param":
                    return event
        return event

    def below(self, event: Event) -> Event:
        """Return the event with a bad tensor of a module inside its module, whose code may use it without a call.

        Some bad tensors are mentioned, and not blamed: if the training has continued since (values on a device), because
        the tensor may have gone bad later; tensors elsewhere in the model; and an infinity in a buffer, which may be a
        legitimate value.
        """
        module, called, below = module_named(self._context, event.module), self._called(), set[int]()
        for path, inner in modules_in(module) if module is not None else ():
            below.add(id(inner))
            name = name_within(event.module, path)
            is_called = not path or name in called
            parameters, buffers = _own(inner, is_called=is_called)
            if event.is_late:
                if is_bad(self._scan([*parameters.values(), *buffers.values()], masks=True)):
                    return event.having(parameters="unknown")
                continue
            event = self._blamed_own(event, name, parameters, is_called=is_called)
            if event.where != "param":
                event = self._blamed_own(event, name, buffers, is_called=False, are_buffers=True, blames_inf=False)
            if event.where == "param":
                return event
        return event if event.is_late else self._with_others(event, below, called)

    def _with_others(self, event: Event, below: set[int], called: set[str]) -> Event:
        """Return the event with a bad tensor elsewhere in the model, which the module's code may use by a reference."""
        roots = (root for root, _ in self._context.models() if any(name == event.module for name, _ in modules(root)))
        for name, module in (one for root in roots for one in modules(root)):
            if id(module) in below:
                continue
            for kind, own in zip(("parameter", "buffer"), _own(module, is_called=name in called)):
                bad = [own_name for own_name, tensor in own.items() if self._is_nan(tensor)]
                if bad:
                    return event.having(elsewhere=f"{name} {kind} {bad[0]}")
        return event

    def _is_nan(self, tensor: Tensor) -> bool:
        return self._scan([tensor], masks=True) == "nan" and self._optimizers.is_used(tensor) is not False

    def _called(self) -> set[str]:
        """Return the names of the modules that have returned in this outermost call."""
        return {returned.module.name for returned in self._context.returned()}

    def _blamed_own(
        self,
        event: Event,
        name: str,
        own: Mapping[str, Tensor],
        *,
        is_called: bool = True,
        are_buffers: bool = False,
        blames_inf: bool = True,
    ) -> Event:
        """Return the event of a bad output with the first bad tensor of a module; `where` is "param" if there is one.

        Args:
            event: the event of a bad output.
            name: name of the module.
            own: its parameters, or its buffers.
            is_called: the module was called. If not, an unused tensor is not blamed, and one that may be unused is
                blamed with `if_used_in`.
            are_buffers: they are its buffers.
            blames_inf: an infinity is blamed, and not only mentioned.
        """
        for own_name, tensor in own.items():
            kind = self._scan.own([tensor])
            if not kind or not isinstance(kind, str):
                continue
            is_used = is_called or self._optimizers.is_used(tensor)
            if is_used is False:
                continue
            if kind == "inf" and not blames_inf:
                event = replace(event, details={"buffer": f"{name} {own_name}", **event.details})
                continue
            details: Details = {"parameter": own_name, **self._scan.counts(tensor)}
            if are_buffers:
                details["is_buffer"] = True
            if is_used is None:
                details["if_used_in"] = event.module
            return replace(event, where="param", module=name, kind=kind, since=event.own_since, details=details)
        return event

    # -- outputs

    def call(self, event: Event, unknown: str) -> Event:
        """Return the event of a model's bad output with the first call with a bad output, in a step that checks no module.

        hookd keeps only weak references to outputs, so some are gone; `or_in` then lists the modules that may be the origin.
        If no call in the model has a bad output, its own code made the bad value.

        Args:
            event: the model's output.
            unknown: why the model's input may have been bad; a good output of a call shows that it was not.
        """
        gone: list[str] = []
        for at, returned in enumerate(self._context.returned()):
            tensor = returned.tensor()
            result = self._scan([tensor], masks=True) if tensor is not None else ""
            if returned.was_finite or (tensor is not None and not result):
                gone.clear()  # an earlier NaN would most likely have reached this output
                unknown = ""
            elif tensor is None or not isinstance(result, str):  # on a device: not known yet
                gone.append(returned.module.name)
            else:
                event, more = self._caller(replace(event, at=at), returned, tensor)
                gone += more
                break
        event = replace(event, is_certain=not gone and not unknown, since=event.step)
        if gone:
            event = event.having(or_in=list(dict.fromkeys(gone)))
        return event.having(inputs=unknown) if unknown else event

    def _caller(self, event: Event, returned: Returned, tensor: Tensor) -> tuple[Event, list[str]]:
        """Return the event with a call, or its caller if an input is bad; and other modules that may be the origin."""
        inputs = [ref() for ref in returned.inputs]
        module, parent, more = returned.module, returned.module.parent, []
        bad = [x for x in inputs if x is not None and x is not tensor and self._scan([x], masks=True)]
        if bad and parent is not None:
            module, tensor = parent, bad[0]
        elif parent is not None and (not inputs or None in inputs):
            more = [parent.name]
        kind, details = str(self._scan([tensor], masks=True)), self._scan.counts(tensor)
        return replace(event, module=module.name, stack=_path(module), kind=kind, details=details), more


def _path(module: Module) -> tuple[str, ...]:
    """Return the names of a module and of the modules that contain it, the outermost first."""
    return (*_path(module.parent), module.name) if module.parent is not None else (module.name,)


def _own(module: nn.Module, *, is_called: bool) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return the parameters of a module, and its buffers unless the call may have written them."""
    is_written = is_called and peek(module, "training") is True
    return parameters_of(module), {} if is_written else buffers_of(module)
