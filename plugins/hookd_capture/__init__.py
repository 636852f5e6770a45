"""Save the module call that produced the first NaN or infinity, so that `hookd replay` can make it again.

Which call. Every call of every module is checked when it returns. The call that is saved is the first one whose output is
bad and whose inputs were good. If the inputs were bad already, the caller of the module decides when it returns; at the
outermost call, that call is saved. A call of a module with a bad parameter of its own is saved as well. So is the last call
of a model, with the gradients that reached its outputs, if an optimizer is about to use bad gradients: its replay runs the
backward, and finds the operation. A step that a GradScaler skips is not such a case.

What happens then. The call is copied at once, and written by a thread of hookd, below `directory` (by default the directory
for program state or for temporary files), readable only by the owner. An incident `bundle` has the path. If there can be no
bundle, an incident `bundle_failed` has the reason: a bundle larger than `bytes` (256 MiB) is not written. The plugin is idle
from then on. `docs/capture.md` describes bundles.

How often. All modules are checked in every step, whatever that costs. With `every=N` they are checked in one step of N, and
the output of the model and the gradients still in every step. If a bad output is seen in a step between, the bundle contains
the whole model. All modules are then checked in every step, and there may be a second bundle, with the module.

`-inf`. A tensor with `-inf`, and no NaN or `+inf`, in outputs, inputs or parameters is good unless `neginf=true`, because
attention masks use it.

Costs in memory. A model's arguments are kept until the end of the step, and the state of the random number generators is read
when a module is entered that may draw some.

Limits. On a device only the outputs of models and the gradients are checked, and they are known one or two steps later: the
inputs are gone by then, so there is no bundle. A bad gradient has none if it was bad when it reached the model, because the
loss is computed outside of any module.
"""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd import (
    Context,
    Module,
    Plugin,
    groups_of,
    hookimpl,
    of_tensor,
    parameters_in,
    parameters_of,
    peek,
    tensors,
    training_stack,
    versions,
)
from hookd_capture.calls import Call, LastCalls, States
from hookd_capture.saving import BadValue, Bundles

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["Capture"]

MOST = 2
"""Largest number of bundles in a run."""
NAMES = {"nan": "NaN", "inf": "Inf"}
LATE = "the values were on a device: when hookd had read them, the module's inputs no longer existed"
OF_LOSS = (
    "the gradient that reached the model was bad: the loss is computed by the training's own functions, not by a module"
)
NOT_REACHED = "in this step no gradient reached the model's last call, or it was changed in place since then"
_grad: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # bypasses a `grad` that a class of parameters defines


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of `tensor` costs nothing."""
    return bool(of_tensor(tensor, "is_cpu"))


class Waiting(NamedTuple):
    """A call with a bad output and bad inputs, until its caller returns; `depth` is the number of calls around it."""

    call: Call
    kind: str
    depth: int


class Capture(Plugin):
    """Saves the call that produced the first NaN or infinity, for `hookd replay`."""

    name = "capture"
    sampled = ("forward_pre", "forward")
    longest = 1

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options."""
        self.context = context
        self.masks = not context.option("neginf", default=False)
        self.bundles = Bundles(context, masks=self.masks)
        self.has_parameters: dict[int, bool] = context.per_module()
        self.states, self.last_calls = States(), LastCalls()
        self.waiting: dict[int, Waiting] = {}  # by thread
        self.left = MOST

    @hookimpl
    def succeed(self, predecessor: Capture) -> None:
        """Take over the calls in progress and the number of bundles of a predecessor with other options."""
        self.states, self.last_calls, self.waiting = predecessor.states, predecessor.last_calls, predecessor.waiting
        self._limit(predecessor.left)

    @hookimpl
    def unconfigure(self) -> None:
        """Drop all references to the training's objects."""
        self._drop()

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Select every module."""
        self.states.learn(module)
        if module.depth:
            return {"forward_pre", "forward", "forward_error"}
        model = module.torch()
        self.has_parameters[module.id] = model is not None and any(True for _ in parameters_in(model))
        return {"root_forward_pre", "root_forward", "forward_error", "backward_pre"}

    # -- calls

    @hookimpl
    def forward_pre(self, module: Module) -> None:
        """Record the random number state with which a module is entered."""
        self.states.enter(module)

    @hookimpl
    def root_forward_pre(self, module: Module) -> None:
        """Record the same for a model, also in steps in which its modules are not checked."""
        self.states.enter(module)

    @hookimpl
    def forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Check a call before its inputs can change."""
        self._returned(Call(module, inputs, kwargs, output, versions, self.states.left(module)))

    @hookimpl
    def root_forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Check a call of a model, and keep it for its backward."""
        call = Call(module, inputs, kwargs, output, versions, self.states.left(module))
        if len(self.context.stack()) > 1:  # another model, or a parametrization that was called by itself once
            self.last_calls.forget(module)
        elif call.state is not None and call.state.grad and self.has_parameters.get(module.id):
            self.last_calls.keep(call)
        self._returned(call)
        for tensor in tensors(output):
            ends = None if on_host(tensor) else self.context.extremes(tensor)
            if ends is not None:
                self._check_later(ends, "output", module.name)

    @hookimpl
    def forward_error(self, module: Module) -> None:
        """Forget the call whose caller was to decide: that caller will not return."""
        self.states.left(module)
        self.waiting.pop(get_ident(), None)

    def _returned(self, call: Call) -> None:
        kind = self._kind(tensors(call.output))
        if kind or self.waiting:
            self._judge(call, kind)

    def _judge(self, call: Call, kind: str) -> None:
        """Save a call whose output is bad, or leave that to its caller; decide for a call in it that waits."""
        thread, depth = get_ident(), len(self.context.stack())
        waiting, of_inputs = self.waiting.get(thread), self._kind_of_inputs(call)
        if waiting is not None and depth < waiting.depth:
            del self.waiting[thread]
            if not kind and not of_inputs:  # made between the two calls, and removed before the outer one returned
                self._save(waiting.call, "input", waiting.kind)
                return
            kind = kind or waiting.kind
        name, of_parameter = self._bad_parameter(call.module) if kind else ("", "")
        if of_parameter:
            self._save(call, "param", of_parameter, parameter=name)
        elif kind and not of_inputs:
            self._save(call, "output", kind)
        elif kind and depth <= 1:
            self._save(call, "input", of_inputs)
        elif kind:
            self.waiting[thread] = Waiting(call, kind, depth)

    def _kind(self, found: Iterable[Tensor | None], *, masks: bool | None = None) -> str:
        """Return "nan" if one of the tensors in host memory has one, else "inf" or ""; `masks` as in `Context.is_finite`."""
        masks = self.masks if masks is None else masks
        worst = ""
        for tensor in found:
            if tensor is not None and on_host(tensor) and not self.context.is_finite(tensor, masks=masks):
                summary = self.context.summary(tensor)
                worst = max(worst, "nan" if summary is not None and summary.nans else "inf")
        return worst

    def _kind_of_inputs(self, call: Call) -> str:
        """Return the kind of a call's inputs; "" also if the call has changed them, so that they are not known."""
        kind = self._kind(tensors((call.inputs, call.kwargs)))
        return "" if kind and call.before and call.before != versions(call.inputs, call.kwargs) else kind

    def _bad_parameter(self, module: Module) -> tuple[str, str]:
        """Return the name and the kind of the first bad parameter that a module itself owns."""
        owner = module.torch()
        own = {} if owner is None else parameters_of(owner)
        kinds = ((name, self._kind([parameter])) for name, parameter in own.items())
        return next(((name, kind) for name, kind in kinds if kind), ("", ""))

    # -- gradients

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Keep the gradient that reaches a model."""
        self.last_calls.reached(module, grad_output)

    @hookimpl
    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check the gradients that are about to be used; with a closure they do not exist yet."""
        if not has_closure:
            self._check_gradients(optimizer)

    @hookimpl
    def closure_done(self, optimizer: Optimizer) -> None:
        """Check the gradients that a closure has made inside the optimizer's step."""
        self._check_gradients(optimizer)

    @hookimpl
    def step_done(self) -> None:
        """Drop everything that is kept for a step."""
        self._drop()

    def _check_gradients(self, optimizer: Optimizer) -> None:
        found_inf = peek(optimizer, "found_inf")
        # With it a fused optimizer discards bad gradients by itself; on a device, whether it does is not known yet.
        if found_inf is not None and (not on_host(found_inf) or (self.context.number(found_inf) or 0) > 0):
            return
        with torch.no_grad():
            largest = self.context.largest_gradient(optimizer)
            for number in [largest] if largest is not None else self.context.largest(_gradients(optimizer)):
                if not isinstance(number, float):
                    self._check_later((number, number), "grad", "")
                elif not number < math.inf:
                    self._save_backward("nan" if math.isnan(number) else "inf")
                    return

    def _save_backward(self, kind: str) -> None:
        """Save the last call of the model whose parameters have the bad gradients."""
        if self.left < MOST:  # a consequence of the bad output that was saved, as is whatever comes after this step
            self._limit(0)
            return
        for call in self.last_calls.with_gradient():
            model = call.module.torch()
            if model is None or not self._kind(
                (_grad(parameter) for _, parameter in parameters_in(model)), masks=False
            ):
                continue
            if self._kind(call.gradient, masks=False):
                self._fail(self._bad(call.module.name, "grad", kind), OF_LOSS)
            else:
                self._save(call, "grad", kind)
            return
        self._fail(self._bad("", "grad", kind), NOT_REACHED)

    # -- values on a device

    def _check_later(self, ends: tuple[Tensor, Tensor], where: str, module: str) -> None:
        """Read the smallest and the largest value of something on a device later; report that it is bad."""
        bad = self._bad(module, where, "")

        def arrived(numbers: list[float]) -> None:
            low, high = numbers
            if not high < math.inf or not (low > -math.inf or self.masks):
                self._fail(bad._replace(value="nan" if math.isnan(high) else "inf"), LATE)

        self.context.later(ends, arrived)

    # -- the end

    def _save(self, call: Call, where: str, kind: str, parameter: str = "") -> None:
        """Save a call, if there may be another bundle."""
        is_between = where == "output" and not call.module.depth and not call.module.leaf and self.context.interval > 1
        if self.left:
            bad = self._bad(call.module.name, where, kind)._replace(python_stack=training_stack())
            self.bundles.save(call, self._words(bad, parameter), bad)
        self._limit(self.left - 1 if is_between else 0)

    def _fail(self, bad: BadValue, why: str) -> None:
        """Report a bad value that has no bundle, if it is the first one."""
        if self.left == MOST:
            self.bundles.fail(self._words(bad), bad, why)
        self._limit(0)

    def _bad(self, module: str, where: str, kind: str) -> BadValue:
        return BadValue(self.context.step, module, where, kind)

    def _words(self, bad: BadValue, parameter: str = "") -> str:
        """Return what is bad, in words."""
        place = {"param": f"parameter {parameter}", "grad": "a gradient"}.get(bad.where, f"the {bad.where}")
        owner = f" of {bad.module}" if bad.module else ""
        counted = "" if self.context.is_step_absolute else " (counted from the attach)"
        return f"{NAMES[bad.value]} in {place}{owner} at step {bad.step}{counted}"

    def _limit(self, left: int) -> None:
        """Set how many bundles may still be written; without any, stop listening."""
        self.left = max(left, 0)
        if not self.left:
            self._drop()
            self.states = States()  # calls in progress are entered, but not left
            for hook in ("forward_pre", "forward", "root_forward_pre", "root_forward", "forward_error", "backward_pre",
                         "step_pre", "closure_done", "step_done"):  # fmt: skip
                self.context.listen(hook, wanted=False)
        elif self.left < MOST:
            self.context.hold(1)

    def _drop(self) -> None:
        self.waiting.clear()
        self.last_calls.clear()


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an optimizer would use."""
    found = (_grad(one) for group in groups_of(optimizer) for one in group["params"])
    return [one for one in found if one is not None]
