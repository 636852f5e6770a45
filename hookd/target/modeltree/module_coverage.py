"""The coverage of modules: the states of `hookd_modules`.

A module's first call goes through a `FirstCall`, which records it and then installs the module's plan in its own place, so that
later calls pay nothing. If a model is called and a module in it is not, the module's parameters get hooks: a gradient there
means that the training bypasses `__call__`, with `.forward()` or by using the parameter in a function of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd.api.passive import class_attribute, hook_gradient, parameters_of, requires_grad
from hookd.target.entry.patch import SKIP
from hookd.wire.originals import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.api.events import Module
    from hookd.api.metrics import Gauge
    from hookd.target.events.step_count import StepCount
    from hookd.target.modeltree.models import Models
    from hookd.target.modeltree.names import Model, Names

OBSERVED, COMPILED, SCRIPTED, BYPASSED, NEVER_CALLED = STATES = (
    "observed", "compiled", "scripted", "bypassed", "never_called"
)  # fmt: skip
_SETTLED_S = 10.0
"""Time after which the calls of a model are taken to be complete, even without a step."""


class FirstCall:
    """Stands in for a module's plan until the module is called."""

    __slots__ = ("coverage", "module", "plan")

    def __init__(self, coverage: Coverage, module: Module, plan: Any) -> None:
        self.coverage, self.module, self.plan = coverage, module, plan

    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call, install the plan, and run it."""
        self.coverage.note(self, id(called))
        return self.plan(called, args, kwargs)


class Coverage:
    """Follows which modules are called, compiled, scripted, bypassed or never called.

    Args:
        gauge: `hookd_modules`.
        callback: wraps a function that the training calls.
    """

    def __init__(
        self, models: Models, *, names: Names, count: StepCount, gauge: Gauge, callback: Callable[..., Any]
    ) -> None:
        self._models, self._names, self._count = models, names, count
        self._entrance = callback
        self._gauge = gauge
        self._called: set[int] = set()  # by the page's module number, which a replica shares with its original
        self._bypassed: set[int] = set()
        self._watched: dict[int, list[Any]] = {}
        self._is_changed = self._is_watch_due = False

    def plan(self, module: Module, plan: Any) -> Any:
        """Return the object to call in place of a plan: a `FirstCall`, or the plan itself once the module has been called."""
        return plan if plan is SKIP or module.id in self._called else FirstCall(self, module, plan)

    def note(self, first: FirstCall, key: int) -> None:
        """Record a module's first call, and install its plan."""
        models = self._models
        with models.lock:  # a detach may be removing all plans
            self._called.add(first.module.id)
            self._is_changed = self._is_watch_due = True
            if models.plans.get(key) is first:
                models.plans[key] = first.plan

    def note_left_out(self) -> None:
        """Record that the number of unobserved modules has changed."""
        self._is_changed = True

    def learnt(self, model: Model) -> None:
        """Record that a model is new or has new modules."""
        model.learnt_at, model.learnt_step = clock.monotonic(), self._count.done
        self.publish()
        self._is_changed = self._is_watch_due = True

    def update(self, *, is_training_thread: bool) -> None:
        """Publish changed states; called at step boundaries, and from time to time by hookd's own thread."""
        if is_training_thread and self._is_watch_due:
            self._is_watch_due = False
            self._watch()
        if self._is_changed:
            self._is_changed = not all(self._is_settled(model) for model in list(self._names.models))
            self.publish()

    def publish(self) -> None:
        """Count the modules in each state."""
        states = [state for _, state in self.states()]
        for state in STATES:
            self._gauge.labels(state).set(states.count(state))
        self._gauge.labels("left_out").set(self._models.left_out())

    def states(self) -> list[tuple[Module, str]]:
        """Return the state of each module; "" if it is never called itself, or no plugin listens there."""
        states: dict[int, tuple[Module, str]] = {}
        for key, (ref, model, module) in list(self._names.known.items()):
            nn_module = ref()
            if nn_module is not None and key not in model.wrapped:  # it counts as one module with its wrapper
                states.setdefault(module.id, (module, self.state(key, nn_module, model, module)))
        return list(states.values())

    def state(self, key: int, nn_module: nn.Module, model: Model, module: Module) -> str:
        """Return the state of one module of a model; `key` is the id of `nn_module`."""
        if issubclass(type(nn_module), torch.jit.ScriptModule):
            return SCRIPTED
        if key in model.compiled:
            return COMPILED
        if self._models.plans.get(key, SKIP) is SKIP:
            return ""
        if module.id in self._called or not self._is_settled(model):
            return OBSERVED
        if module.id in self._bypassed:
            return BYPASSED
        # Containers such as ModuleList are never called: they have no forward of their own.
        return "" if has_no_forward(nn_module) else NEVER_CALLED

    def _is_settled(self, model: Model) -> bool:
        has_stepped = self._count.done > model.learnt_step
        return model.walk is None and (has_stepped or clock.monotonic() - model.learnt_at > _SETTLED_S)

    # -- gradients of modules that are never called

    def _watch(self) -> None:
        missing = {module.id for module, state in self.states() if state == NEVER_CALLED}
        for number in [number for number in list(self._watched) if number not in missing]:
            self._release(number)
        if missing - self._watched.keys() and hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            self._hook(missing)

    def _hook(self, missing: set[int]) -> None:
        known: list[tuple[Any, int]] = [(ref(), module.id) for ref, _, module in list(self._names.known.values())]
        # A parameter that two modules share gets its gradient through either.
        shared = {
            id(p)
            for nn_module, number in known
            if nn_module is not None and number not in missing
            for p in parameters_of(nn_module).values()
        }
        for nn_module, number in known:
            if nn_module is not None and number in missing and number not in self._watched:
                hook = self._got_gradient(number)
                self._watched[number] = [
                    hook_gradient(p, hook)
                    for p in parameters_of(nn_module).values()
                    if requires_grad(p) and id(p) not in shared
                ]

    def _got_gradient(self, number: int) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            if number not in self._bypassed:
                self._bypassed.add(number)
                self._is_changed = True

        return self._entrance(hook)

    def _release(self, number: int) -> None:
        for handle in self._watched.pop(number, ()):  # hookd's own thread may have removed it meanwhile
            handle.remove()

    def forget(self, modules: Iterable[Module]) -> None:
        """Forget the modules of a model that is gone."""
        for module in modules:
            self._called.discard(module.id)
            self._bypassed.discard(module.id)
            self._release(module.id)

    def restore(self) -> None:
        """Remove all hooks."""
        for number in list(self._watched):
            self._release(number)


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module is never called itself because it only holds others, as a ModuleList does."""
    return class_attribute(type(module), "forward") is nn.Module.__dict__["forward"]
