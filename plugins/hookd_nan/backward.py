"""Looks at gradients, losses and what optimizers are about to use. Runs in the target."""

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
    """The hooks on backwards, losses and steps."""

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Note in which order the gradients reached the modules; of a container, look at what reached it."""
        self.order += 1
        self.reached[module.id] = self.order
        if not module.depth:
            self.backwards.note(self.context.step)
            if self.captures:
                self.capture.reached(module, grad_output)
        if not module.leaf and not self.reporter.is_over:
            self._look_at_gradient(module, grad_output, grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Look at the gradient that leaves the module; if none does, or if it is bad, at the one that reached it."""
        if not self.reporter.is_over:  # what is bad later follows from the origin; the outputs show how far it spread
            self._look_at_gradient(module, grad_input, grad_output)

    def _look_at_gradient(self, module: Module, leaves: tuple[Any, ...], reached: tuple[Any, ...]) -> None:
        found = self.scan(tensors_in(leaves) or tensors_in(reached))
        if found:
            event = self._event("grad", module.name, self.backwards)
            event.reached = self.reached.get(module.id, 0)
            reached_found = self.scan(tensors_in(reached))
            if self.captures and self.queue.is_known(found, reached_found):
                event.call = self.capture.held()
            self.queue.submit(self._judge_gradient, event, found, reached_found)

    def _judge_gradient(self, event: Event) -> None:
        """Order a module that a bad gradient reached by its arrival, and one that made it by when it was noticed.

        Of a container and a module in it, the container was reached first.
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
        """Look at what a backward starts from, and at what became of the gradients of the one before."""
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
        """Give the first module whose output has a `-inf`, which was taken for a mask, as far as outputs still live."""
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
        """Give the optimizers of which no bad gradient is left, and whether none is at all: else they accumulate still."""
        if self.queue.entries and not self._is_any_unknown():
            having = self.gradients.having()
            return self.gradients.numbers() - having, not having
        grads = self.gradients.by_optimizer()
        if self.queue.entries:  # nobody knows yet which were bad
            return self.gradients.numbers() - set(grads), not grads
        bad = {one for one, found in grads.items() if self.scan.many(list(found.values()))}
        return {*self.judge.suspects, *self.judge.settled} - bad, not bad

    def _is_any_unknown(self) -> bool:
        """Say whether anything bad may be in gradients of no known optimizer: to find those all models are searched."""
        waiting = (entry.event for entry in self.queue.entries)
        is_asked = any(event.where == "grad" and not event.optimizer for event in waiting)
        return is_asked or self.judge.is_suspicious or 0 in self.judge.settled or not self.gradients.knows_any

    def _is_waiting(self) -> bool:
        """Say whether bad gradients may have been there that somebody was to clear."""
        return self.judge.is_suspicious or bool(self.judge.settled or self.queue.entries)

    @hookimpl
    def loss_done(self) -> None:
        """Look at the parameters' gradients where no optimizer step may follow: under a GradScaler; see `loss`."""
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
        """Look at the gradients that are about to be used; with a closure they are not there yet."""
        self.stepping, self.is_skipping = optimizer, False
        self.has_closure = self.has_closure or has_closure
        if not has_closure:
            self._about_to_use(optimizer)

    @hookimpl
    def closure_done(self, optimizer: Optimizer) -> None:
        """Look at the gradients that a closure has made inside of the optimizer's step."""
        self._about_to_use(optimizer)

    def _about_to_use(self, optimizer: Optimizer) -> None:
        """Look at gradients that are reduced over ranks, accumulated and unscaled."""
        self.used.note(self.context.step)
        with torch.no_grad():  # with a policy this hook is a mutator's, for whom nothing is switched off
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
        """Judge what was found in the gradients that an optimizer holds; it is None where it is not stepping now."""
        event = self._event("grad", "")
        event.optimizer, event.is_first_step = number, is_first
        event.is_certain = self.backwards.latest == event.step
        if found and isinstance(found, str) and not self.reporter.is_over:  # which is dear, and only told of once
            self.gradients.blame(event, optimizer)
            event.call = self.capture.held()
            found = event.kind or found
        if isinstance(found, list) and not self.reporter.is_over:
            judge = partial(self._judge_named, judge, holders=list(grads))
        self.queue.submit(judge, event, found, self.scan(flag))

    def _judge_named(self, judge: Callable[[Event], None], event: Event, *, holders: list[int]) -> None:
        """Judge gradients whose numbers have come from a device, with the parameter of the first bad one."""
        if event.bad:
            self.gradients.blame_late(event, holders)
        judge(event)

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `inputs` says whether a fused optimizer was told to skip it."""
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
        """End the step: what is on a device is sent on its way, and what has arrived is judged."""
        self.stepping = None
        self.scan.is_strict = self.scan.is_strict or self.used.latest != self.context.step
        self._hold_gates(is_over=True)
        self.judge.pending.clear()
        self.capture.let_go()
        self.reporter.step_done()
        # Once it is known where it was born, all that follows is bad, and is looked at on sampled steps.
        self.context.listen("suspect", wanted=not self.reporter.is_over)
        self.queue.flush()
