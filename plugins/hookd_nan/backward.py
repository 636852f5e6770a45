"""Check gradients, losses, and the gradients that optimizers are about to use."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hookd import Module, hookimpl, of_tensor, peek
from hookd import tensors as tensors_in
from hookd_nan.looking import Looking
from hookd_nan.scan import INF, Found, is_bad, is_scaled, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd_nan.gradients import Held
    from hookd_nan.judge import Event


class Backward(Looking):
    """The hooks for backwards, losses and optimizer steps."""

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Record the order in which gradients reach the modules; check those that reach a container."""
        self.order += 1
        self.reached[module.id] = self.order
        if not module.depth:
            self.backwards.note(self.context.step)
        if not module.leaf and not self.reporter.is_over:
            self._look_at_gradient(module, grad_output, grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Check the gradient that leaves the module; if none does, or if it is bad, also the one that reached it."""
        if not self.reporter.is_over:  # later bad gradients are consequences; the outputs show how far they spread
            self._look_at_gradient(module, grad_input, grad_output)

    def _look_at_gradient(self, module: Module, leaves: tuple[Any, ...], reached: tuple[Any, ...]) -> None:
        found = self.scan(tensors_in(leaves) or tensors_in(reached))
        if found:
            event = self._event("grad", module.name, self.backwards)
            event.reached = self.reached.get(module.id, 0)
            self.queue.submit(self._judge_gradient, event, found, self.scan(tensors_in(reached)))

    def _judge_gradient(self, event: Event) -> None:
        """Judge a module's gradient.

        If a bad gradient reached the module, its arrival counts as the time of the event; if the module made it, the
        check does. A container is reached before the modules in it.
        """
        if event.inputs:
            event.order = event.reached
        if event.kind:
            self.undecided.append(event)
            self.judge.flow(event)
            self.context.listen("loss_done", wanted=True)

    # -- loss

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Check the loss, and find out what became of the gradients of the previous backward."""
        number = self.recorder.loss(tensors)
        self.gates.note(self.context.step)
        self.scaled = any(is_scaled(of_tensor(tensor, "grad_fn")) for tensor in tensors_in(tensors))
        is_good = isinstance(number, float) and math.isfinite(number) and len(tensors) == 1
        found = "" if is_good else self.scan(tensors_in(tensors))
        masked = self._masked() if found and self.masks and not self.reporter.is_over else []
        cleared, is_clear = self._cleared() if self._is_waiting() else (set(), False)
        if found or cleared or is_clear:
            event = self._event("loss", "", self.gates)
            event.details = {"neginf_in": masked} if masked else {}
            judge = partial(self._judge_loss, cleared=cleared, is_clear=is_clear)
            self.queue.submit(judge, event, found)
        self._hold_gates(is_over=False)
        self.context.listen("loss_done", wanted=self.scaled or self.judge.is_suspicious)

    def _masked(self) -> list[str]:
        """Return the name of the first module whose output has a `-inf` that was taken for a mask.

        Returns:
            At most one name; none if no output that still exists has a `-inf`.
        """
        for returned in self.context.returned():
            tensor = returned.tensor()
            if tensor is not None and on_host(tensor) and self.scan([tensor]):
                return [returned.module.name]
        return []

    def _judge_loss(self, event: Event, *, cleared: set[int], is_clear: bool) -> None:
        self._count(event)
        skipped = self.judge.skipped
        origin = self.judge.loss(event, cleared=cleared, is_clear=is_clear)
        self._blame_update(origin)
        self.reporter.report(origin)
        self._skipped(self.judge.skipped - skipped)

    def _cleared(self) -> tuple[set[int], bool]:
        """Return the optimizers that hold no bad gradient any more, and whether no bad gradient is left at all.

        If some are left, the training is still accumulating gradients.
        """
        if self.queue.entries and not self._is_any_unknown():
            having = self.gradients.having()
            return self.gradients.numbers() - having, not having
        grads = self.gradients.by_optimizer()
        if self.queue.entries:  # which gradients were bad is not known yet
            return self.gradients.numbers() - set(grads), not grads
        bad = {number for number, found in grads.items() if self.scan.many(list(found.values()))}
        return {*self.judge.suspects, *self.judge.settled} - bad, not bad

    def _is_any_unknown(self) -> bool:
        """Whether gradients that no known optimizer holds may be bad; finding them means a search of all models."""
        waiting = (entry.event for entry in self.queue.entries)
        is_asked = any(event.where == "grad" and not event.optimizer for event in waiting)
        return is_asked or self.judge.is_suspicious or 0 in self.judge.settled or not self.gradients.knows_any

    def _is_waiting(self) -> bool:
        """Whether there may have been bad gradients, so that their fate must be found out."""
        return self.judge.is_suspicious or bool(self.judge.settled or self.queue.entries)

    @hookimpl
    def loss_done(self) -> None:
        """Check the parameters' gradients if a GradScaler may skip the optimizer step.

        `loss` enables this hook.
        """
        if self.stepping is None:
            for number, grads in self.gradients.by_optimizer().items():
                if self.queue.is_known() and number in self.judge.suspects:
                    continue
                found = self.scan.many(list(grads.values()))
                if found:
                    self._judge_gradients(self.judge.gradients, None, number, grads, found)

    # -- the step

    @hookimpl
    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check the gradients that are about to be used; with a closure they do not exist yet."""
        self.stepping, self.is_skipping = optimizer, False
        self.has_closure = self.has_closure or has_closure
        if not has_closure:
            self._about_to_use(optimizer)

    @hookimpl
    def closure_done(self, optimizer: Optimizer) -> None:
        """Check the gradients that a closure has made inside the optimizer's step."""
        self._about_to_use(optimizer)

    def _about_to_use(self, optimizer: Optimizer) -> None:
        """Check the gradients of an optimizer, which are reduced over ranks, accumulated and unscaled by now."""
        self.used.note(self.context.step)
        with torch.no_grad():  # with a policy the plugin is a mutator, whose hooks run in the training's modes
            found = self.scan.gradients(optimizer)
            self.recorder.step(optimizer, self.scan.largest)
            self.is_skipping = self.policy.may_skip(optimizer) and is_bad(found)
            found_inf = peek(optimizer, "found_inf")
            flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
            number, is_first = self.gradients.meet(optimizer)
            if not (found or flag or self.undecided) and self.judge.is_calm and self.queue.is_known():
                return
            held = self.gradients.held_by(optimizer)
            self._judge_gradients(self._decide, optimizer, number, held, found, flag, is_first=is_first)
        if self.is_skipping:
            self.policy.skip(optimizer)

    def _judge_gradients(  # noqa: PLR0913, PLR0917
        self,
        judge: Callable[[Event], None],
        optimizer: Optimizer | None,
        number: int,
        grads: Held,
        found: Found,
        flag: Iterable[Tensor] = (),
        *,
        is_first: bool = False,
    ) -> None:
        """Judge the gradients that an optimizer holds.

        Args:
            judge: the function that judges the event.
            optimizer: the optimizer if it is stepping now, else None.
            number: its number.
            grads: its gradients.
            found: the result of their check.
            flag: infinity if the optimizer was given `found_inf`, else 0; empty if it takes none.
            is_first: this is the optimizer's first step.
        """
        event = self._event("grad", "")
        event.optimizer, event.is_first_step = number, is_first
        event.is_certain = self.backwards.latest == event.step
        if found and isinstance(found, str) and not self.reporter.is_over:  # expensive, and reported only once
            self.gradients.blame(event, optimizer)
            found = event.kind or found
        if isinstance(found, list) and not self.reporter.is_over:
            judge = partial(self._judge_named, judge, holders=list(grads))
        self.queue.submit(judge, event, found, self.scan(flag))

    def _judge_named(self, judge: Callable[[Event], None], event: Event, *, holders: list[int]) -> None:
        """Judge gradients whose values have come from a device, and name the parameter of the first bad one."""
        if event.bad:
            self.gradients.blame_late(event, holders)
        judge(event)

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `event.inputs` is set if a fused optimizer was given `found_inf`."""
        skipped = self.judge.skipped
        is_used = bool(event.kind) and not event.inputs
        if is_used:
            for bad in self.undecided or [event]:
                self._count(bad)
        self.reporter.report(self.judge.step(event, found_inf=bool(event.inputs)))
        self._skipped(self.judge.skipped - skipped)
        if not self.judge.is_suspicious:
            self.undecided.clear()
        if is_used and not self.is_skipping:
            self.reporter.gradients_used()

    def _skipped(self, steps: int) -> None:
        if steps:
            self.skipped.inc(steps)
            self.undecided.clear()

    @hookimpl
    def step_post(self) -> None:
        """End the step: request the values on devices, and judge those that have arrived."""
        self.stepping = None
        self.scan.is_strict = self.scan.is_strict or self.used.latest != self.context.step
        self._hold_gates(is_over=True)
        self.judge.pending.clear()
        self.reporter.step_done()
        # Once the origin is known, everything after it is bad, and sampled steps are enough.
        self.context.listen("suspect", wanted=not self.reporter.is_over)
        self.queue.flush()
