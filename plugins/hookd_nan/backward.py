"""Looks at gradients, losses and what optimizers are about to use. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd import Module, hookimpl
from hookd import tensors as tensors_in
from hookd_nan.looking import Looking
from hookd_nan.scan import INF, Found, is_bad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

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
            self.judge.gradient(event)

    # -- loss

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Look at what a backward starts from, and at what became of the gradients of the one before."""
        self.recorder.loss(tensors)
        self.gates.note(self.context.step)
        self.scaled = any(getattr(t, "grad_fn", None).__class__.__name__ == "MulBackward0" for t in tensors_in(tensors))
        found = self.scan(tensors_in(tensors))
        cleared = (self.judge.suspect is not None or bool(self.queue.entries)) and self._is_cleared()
        if found or cleared:
            event = self._event("loss", "", self.gates)
            self.queue.submit(lambda event: self._judge_loss(event, cleared=cleared), event, found)

    def _judge_loss(self, event: Event, *, cleared: bool) -> None:
        self._count(event)
        skipped = self.judge.skipped
        self.reporter.report(self.judge.loss(event, cleared=cleared))
        self._skipped(self.judge.skipped - skipped)

    def _is_cleared(self) -> bool:
        """Say whether no bad gradient is left over: else the gradients are still being accumulated."""
        grads = self.gradients.of(None)
        return not grads if self.queue.entries else not self.scan.many(grads)

    @hookimpl
    def loss_done(self) -> None:
        """Look at the parameters' gradients where no optimizer step may follow (GradScaler) or runs already (LBFGS)."""
        if self.stepping is not None:
            self._judge_step(self.stepping, self.scan.many(self.gradients.of(self.stepping)))
        elif self.scaled and self.judge.suspect is None:
            self._judge_gradients(self.judge.gradient, None, self.scan.many(self.gradients.of(None)))

    # -- the step

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Look at the gradients that are about to be used: reduced over ranks, accumulated and unscaled."""
        with torch.no_grad():  # with a policy this hook is a mutator's, for whom nothing is switched off
            found = self.scan.many(self.gradients.of(optimizer))
            self.is_skipping = self.policy.may_skip(optimizer) and is_bad(found)
            self._judge_step(optimizer, found)
        if self.is_skipping:
            self.policy.skip(optimizer)
        self.recorder.step(optimizer, self.scan.largest)
        self.stepping = optimizer

    def _judge_step(self, optimizer: Optimizer, found: Found) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
        self._judge_gradients(self._decide, optimizer, found, flag)

    def _judge_gradients(
        self, judge: Callable[[Event], None], optimizer: Optimizer | None, found: Found, flag: Iterable[Tensor] = ()
    ) -> None:
        """Judge what was found in the gradients of all parameters, or of those that an optimizer holds."""
        event = self._event("grad", "")
        event.is_certain = self.backwards.latest == event.step
        if found and isinstance(found, str):
            self.gradients.blame(event, optimizer)
            event.call = self.capture.held()
            found = event.kind or found
        self.queue.submit(judge, event, found, self.scan(flag))

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `inputs` says whether a fused optimizer was told to skip it."""
        skipped = self.judge.skipped
        is_used = bool(event.kind) and not event.inputs
        if is_used:
            for bad in self.undecided or [event]:
                self._count(bad)
        self.undecided.clear()
        self.reporter.report(self.judge.step(event, found_inf=bool(event.inputs)))
        self._skipped(self.judge.skipped - skipped)
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
        self.judge.pending.clear()
        self.capture.let_go()
        self.queue.flush()
