"""Check the gradients that optimizers are about to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hookd import peek
from hookd_nan.scan import INF, Found, is_bad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context
    from hookd_nan.backward import Fates
    from hookd_nan.blame import Blame
    from hookd_nan.findings import Checks, Findings
    from hookd_nan.judge import Event, Judge
    from hookd_nan.optimizers import Held, Optimizers
    from hookd_nan.pending import Queue
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder
    from hookd_nan.scan import Scan


@dataclass
class Steps:
    """Checks the gradients of optimizers, after a backward and before a step."""

    context: Context
    scan: Scan
    checks: Checks
    judge: Judge
    queue: Queue
    findings: Findings
    fates: Fates
    optimizers: Optimizers
    blame: Blame
    recorder: Recorder
    policy: Policy
    _stepping: Optimizer | None = None
    _is_skipping: bool = False  # the gradients of the step in progress were removed

    def succeed(self, predecessor: Steps) -> None:
        """Take over the step in progress."""
        self._stepping = predecessor._stepping  # noqa: SLF001

    def loss_done(self) -> None:
        """Check the parameters' gradients if a GradScaler may skip the optimizer step.

        `loss` enables this hook.
        """
        if self._stepping is None:
            for number, grads in self.optimizers.by_optimizer().items():
                if self.queue.is_known() and number in self.judge.suspects:
                    continue
                found = self.scan.many(list(grads.values()))
                if found:
                    self._judge_gradients(self.judge.gradients, None, number, grads, found)

    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check the gradients that are about to be used; with a closure they do not exist yet."""
        self._stepping, self._is_skipping = optimizer, False
        self.fates.has_closure = self.fates.has_closure or has_closure
        if not has_closure:
            self._about_to_use(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Check the gradients that a closure has made inside the optimizer's step."""
        self._about_to_use(optimizer)

    def _about_to_use(self, optimizer: Optimizer) -> None:
        """Check the gradients of an optimizer, which are reduced over ranks, accumulated and unscaled by now."""
        self.checks.used.note(self.context.step)
        with torch.no_grad():  # with a policy the plugin is a mutator, whose hooks run in the training's modes
            found = self.scan.gradients(optimizer)
            self.recorder.step(optimizer, self.scan.largest)
            self._is_skipping = self.policy.may_skip(optimizer) and is_bad(found)
            found_inf = peek(optimizer, "found_inf")
            flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
            number, is_first = self.optimizers.meet(optimizer)
            if not (found or flag or self.fates.undecided) and self.judge.is_calm and self.queue.is_known():
                return
            held = self.optimizers.held_by(optimizer)
            self._judge_gradients(self._decide, optimizer, number, held, found, flag, is_first=is_first)
        if self._is_skipping:
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
        is_certain = self.checks.backwards.latest == self.context.step
        event = self.checks.event("grad", "", optimizer=number, is_first_step=is_first, is_certain=is_certain)
        if found and isinstance(found, str) and not self.findings.is_over:  # expensive, and reported only once
            event = self.blame.gradient(event, optimizer)
            found = event.kind or found
        if isinstance(found, list) and not self.findings.is_over:
            judge = partial(self._judge_named, judge, holders=list(grads))
        self.queue.submit(judge, event, found, self.scan(flag))

    def _judge_named(self, judge: Callable[[Event], None], event: Event, *, holders: list[int]) -> None:
        """Judge gradients whose values have come from a device, and name the parameter of the first bad one."""
        judge(self.blame.late_gradient(event, holders) if event.bad else event)

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `event.inputs` is set if a fused optimizer was given `found_inf`."""
        if event.is_unread or (event.kind and event.unread):
            if not event.inputs:  # nor is it known what became of earlier bad gradients
                return
            event = replace(event, kind=event.kind or event.inputs)
        skipped = self.judge.skipped
        is_used = bool(event.kind) and not event.inputs
        if is_used:
            for bad in self.fates.undecided or [event]:
                self.findings.count(bad)
        self.findings.report_as_found(self.judge.step(event, found_inf=bool(event.inputs)))
        self.fates.count_skipped(self.judge.skipped - skipped)
        if not self.judge.is_suspicious:
            self.fates.undecided.clear()
        if is_used and not self._is_skipping:
            self.findings.gradients_used()

    def step_post(self) -> None:
        """End the step: forget what belongs to it."""
        self._stepping = None
        self.scan.is_strict = self.scan.is_strict or self.checks.used.latest != self.context.step
        self.fates.hold_gates(is_over=True)
        self.judge.pending.clear()
