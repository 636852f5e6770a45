"""What is seen of each module, and what is not: the states of `hookd_modules`. Runs in the target.

A module's first call goes through a `First`, which notes it and then makes way for the module's plan, so that later
calls pay nothing. What was not called at a step, though its model was, gets hooks on its parameters: a gradient there
means that somebody goes past `__call__`, with `.forward()` or by using the parameter in a function of their own.
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
"""After so long without a step a model that was called is taken to have been called as it will be."""


class First:
    """Stands in a module's plan's place until the module is called."""

    __slots__ = ("module", "plan", "seen")

    def __init__(self, seen: Seen, module: Module, plan: Any) -> None:
        self.seen, self.module, self.plan = seen, module, plan

    def __call__(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call, make way, and go on as the plan does."""
        self.seen.note(self, id(called))
        return self.plan(called, args, kwargs)


class Seen:
    """Follows which modules are called, compiled, scripted, bypassed or never called.

    Args:
        models: has the plans, and their lock.
        names: of the models.
        count: of steps.
        gauge: `hookd_modules`.
        entrance: makes what the training calls.
    """

    def __init__(
        self, models: Models, *, names: Names, count: StepCount, gauge: Gauge, entrance: Callable[..., Any]
    ) -> None:
        self._models, self._names, self._count = models, names, count
        self._entrance = entrance
        self._gauge = gauge
        self._called: set[int] = set()  # by the numbers of the page, which a replica shares with its original
        self._bypassed: set[int] = set()
        self._watched: dict[int, list[Any]] = {}
        self._is_changed = self._is_watch_due = False

    def plan(self, module: Module, plan: Any) -> Any:
        """Give what is to be called instead of a plan: the plan itself once the module has been called."""
        return plan if plan is SKIP or module.id in self._called else First(self, module, plan)

    def note(self, first: First, key: int) -> None:
        """Put the plan in its place; under the lock, because a detach may be taking all plans away."""
        models = self._models
        with models.lock:
            self._called.add(first.module.id)
            self._is_changed = self._is_watch_due = True
            if models.plans.get(key) is first:
                models.plans[key] = first.plan

    def note_left_out(self) -> None:
        """Note that there are modules that are not to be observed."""
        self._is_changed = True

    def learnt(self, model: Model) -> None:
        """Take a model that is new, or that has got new modules."""
        model.learnt_at, model.learnt_step = clock.monotonic(), self._count.done
        self.publish()
        self._is_changed = self._is_watch_due = True

    def look(self, *, is_training_thread: bool) -> None:
        """Publish what has changed; at a step boundary, and from time to time."""
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
        """Give the state of each module, an empty one where there is nothing to see or nobody looks."""
        found: dict[int, tuple[Module, str]] = {}
        for key, (ref, model, module) in list(self._names.known.items()):
            held = ref()
            if held is not None and key not in model.wrapped:  # one module with its wrapper
                found.setdefault(module.id, (module, self.state(key, held, model, module)))
        return list(found.values())

    def state(self, key: int, held: nn.Module, model: Model, module: Module) -> str:
        """Give the state of one module of a model; `key` is the id of `held`."""
        if issubclass(type(held), torch.jit.ScriptModule):
            return SCRIPTED
        if key in model.compiled:
            return COMPILED
        if self._models.plans.get(key, SKIP) is SKIP:
            return ""
        if module.id in self._called or not self._is_settled(model):
            return OBSERVED
        if module.id in self._bypassed:
            return BYPASSED
        # ModuleList and its kind are never called: they have no forward of their own.
        return "" if has_no_forward(held) else NEVER_CALLED

    def _is_settled(self, model: Model) -> bool:
        has_stepped = self._count.done > model.learnt_step
        return model.walk is None and (has_stepped or clock.monotonic() - model.learnt_at > _SETTLED_S)

    # -- gradients of what is never called

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
            for held, number in known
            if held is not None and number not in missing
            for p in parameters_of(held).values()
        }
        for held, number in known:
            if held is not None and number in missing and number not in self._watched:
                hook = self._got_gradient(number)
                self._watched[number] = [
                    hook_gradient(p, hook)
                    for p in parameters_of(held).values()
                    if requires_grad(p) and id(p) not in shared
                ]

    def _got_gradient(self, number: int) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            if number not in self._bypassed:
                self._bypassed.add(number)
                self._is_changed = True

        return self._entrance(hook)

    def _release(self, number: int) -> None:
        for handle in self._watched.pop(number, ()):  # hookd's own thread may have forgotten it meanwhile
            handle.remove()

    def forget(self, modules: Iterable[Module]) -> None:
        """Forget a model that is gone."""
        for module in modules:
            self._called.discard(module.id)
            self._bypassed.discard(module.id)
            self._release(module.id)

    def restore(self) -> None:
        """Take back all hooks."""
        for number in list(self._watched):
            self._release(number)


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module is never called itself: it only holds others, as a ModuleList does."""
    return class_attribute(type(module), "forward") is nn.Module.__dict__["forward"]
