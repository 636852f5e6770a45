"""Check losses and gradients, and keep bad gradients until it is known whether an optimizer uses them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hookd import of_tensor, peek
from hookd import tensors as tensors_in
from hookd_nan.optimizers import gradients_of
from hookd_nan.scan import INF, Result, is_bad, is_scaled, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context, Module
    from hookd_nan.blame import Blame
    from hookd_nan.findings import Checks, Findings
    from hookd_nan.judge import Event, Judge
    from hookd_nan.optimizers import GradientsById, Optimizers
    from hookd_nan.pending import Queue
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder
    from hookd_nan.scan import Scan

GATES = ("step_pre", "closure_done")
"""The hooks that check the gradients that an optimizer is about to use."""
SMALL = 1 << 14
"""Gradients with at most so many elements are checked after every backward: a NaN reaches those of biases and normalizations too."""


@dataclass
class Gradients:
    """Checks the losses, the gradients between modules, and those that optimizers are about to use.

    Attributes:
        undecided: bad gradients, not counted until their fate is known.
        is_scaled: the last loss looked scaled by a GradScaler.
        was_scaled: any loss since the last step did.
        has_closure: an optimizer calls a closure: gradients are made and used in the same step.
        reached: by module.id: the value of `Checks.order` when a gradient last reached it.
        stepping: the optimizer whose step is in progress.
        is_skipping: the gradients of that step were removed.
    """

    context: Context
    scan: Scan
    checks: Checks
    judge: Judge
    queue: Queue
    findings: Findings
    blame: Blame
    recorder: Recorder
    optimizers: Optimizers
    policy: Policy
    undecided: list[Event] = field(default_factory=list)
    is_scaled: bool = False
    was_scaled: bool = False
    has_closure: bool = False
    reached: dict[int, int] = field(default_factory=dict)
    stepping: Optimizer | None = None
    is_skipping: bool = False

    def __post_init__(self) -> None:
        self._skipped = self.context.counter("amp_skipped_steps", "Optimizer steps skipped for overflowed gradients.")
        self._skipped.inc(0)  # so that the series is there from the start

    # -- gradients between modules

    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Record the order in which gradients reach the modules; check those that reach a container."""
        self.checks.order += 1
        self.reached[module.id] = self.checks.order
        if not module.depth:
            self.checks.backwards.note(self.context.step)
        if not module.leaf:
            self.backward(module, grad_output, grad_output)

    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Check the gradient that leaves the module; if none does, or if it is bad, also the one that reached it."""
        if self.findings.is_over:  # later bad gradients are consequences; the outputs show how far they spread
            return
        result = self.scan(tensors_in(grad_input) or tensors_in(grad_output))
        if result:
            reached = self.reached.get(module.id, 0)
            event = self.checks.event("grad", module.name, self.checks.backwards, reached=reached)
            self.queue.submit(self._judge_between, event, result, self.scan(tensors_in(grad_output)))

    def _judge_between(self, event: Event) -> None:
        """Judge a module's gradient.

        If a bad gradient reached the module, its arrival counts as the time of the event; if the module made it, the
        check does. A container is reached before the modules in it.
        """
        if event.inputs:
            event = replace(event, order=event.reached)
        if event.kind:
            self.undecided.append(event)
            self.judge.flow(event)
            self.context.listen("loss_done", wanted=True)

    # -- losses

    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Check the loss, and find out what became of the gradients of the previous backward."""
        number = self.recorder.loss(tensors)
        self.checks.gates.note(self.context.step)
        self.is_scaled = any(is_scaled(of_tensor(tensor, "grad_fn")) for tensor in tensors_in(tensors))
        is_good = isinstance(number, float) and math.isfinite(number) and len(tensors) == 1
        result = "" if is_good else self.scan(tensors_in(tensors))
        masked = self._masked() if result and not self.scan.neginf and not self.findings.is_over else []
        # There may have been bad gradients, so their fate must be determined.
        is_waiting = (
            self.judge.is_suspicious or self.queue.entries or (self.judge.settled and not self._is_left_alone())
        )
        cleared, is_clear = self._cleared() if is_waiting else (set(), False)
        if result or cleared or is_clear:
            event = self.checks.event("loss", "", self.checks.gates)
            event = event.having(neginf_in=masked) if masked else event
            self.queue.submit(partial(self._judge_loss, cleared=cleared, is_clear=is_clear), event, result)
        self._hold_gates(is_over=False)
        # `is_strict`: the gates are not checked in every step.
        is_waiting = self.judge.is_suspicious or (self.scan.is_strict and not self.findings.is_over)
        self.context.listen("loss_done", wanted=self.is_scaled or is_waiting)

    def _is_left_alone(self) -> bool:
        """Whether the origin is known, and the last gradients that were used were not checked: then they need not be now."""
        return self.findings.is_over and self.context.step - self.checks.used.latest > 1

    def _masked(self) -> list[str]:
        """Return the name of the first module whose output still exists and has a `-inf` that was taken for a mask, if any."""
        outputs = ((returned.module.name, returned.tensor()) for returned in self.context.returned())
        names = (name for name, x in outputs if x is not None and on_host(x) and self.scan([x]))
        return list(islice(names, 1))

    def _judge_loss(self, event: Event, *, cleared: set[int], is_clear: bool) -> None:
        self.findings.count(event)
        skipped = self.judge.skipped
        self.findings.report(self.judge.loss(event, cleared=cleared, is_clear=is_clear))
        self._count_skipped(skipped)

    def _count_skipped(self, before: int) -> None:
        """Count the steps skipped since the judge knew of `before`; their bad gradients were discarded."""
        if self.judge.skipped > before:
            self._skipped.inc(self.judge.skipped - before)
            self.undecided.clear()

    def _cleared(self) -> tuple[set[int], bool]:
        """Return the optimizers that hold no bad gradient any more, and whether no bad gradient is left at all.

        If some are left, the training is still accumulating gradients.
        """
        if self.queue.entries:  # which gradients were bad is not known yet
            numbers = self.optimizers.numbers()
            holding = set(self.optimizers.by_optimizer()) if self._is_any_unknown() else self.optimizers.having()
            return numbers - holding, not holding
        bad = {n for n, grads in self.optimizers.by_optimizer().items() if self.scan.many(list(grads.values()))}
        return {*self.judge.suspects, *self.judge.settled} - bad, not bad

    def _is_any_unknown(self) -> bool:
        """Whether gradients that no known optimizer holds may be bad; finding them means a search of all models."""
        waiting = (entry.event for entry in self.queue.entries)
        is_asked = any(event.where == "grad" and not event.optimizer for event in waiting)
        return is_asked or self.judge.is_suspicious or 0 in self.judge.settled or not self.optimizers.known

    # -- gradients of optimizers

    def loss_done(self) -> None:
        """Check all gradients if a GradScaler may skip the optimizer step, else the small ones; `loss` enables this hook."""
        if self.stepping is not None:
            return
        if not (self.is_scaled or self.judge.is_suspicious):
            found = (self.context.largest_gradient(one, SMALL) for one in self.optimizers.live())
            if any(largest is not None and not largest < INF for largest in found):
                self.context.hold(1, *GATES)  # so that all are checked before the optimizer uses them
        else:
            for number, grads in self.optimizers.by_optimizer().items():
                if self.queue.is_empty and number in self.judge.suspects:
                    continue
                result = self.scan.many(list(grads.values()))
                if result:
                    self._judge_optimizer(self.judge.gradients, None, number, grads, result)

    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check the gradients that are about to be used; with a closure they do not exist yet."""
        self.stepping, self.is_skipping = optimizer, False
        self.has_closure = self.has_closure or has_closure
        if not has_closure:
            self.closure_done(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Check the gradients of an optimizer, which are reduced over ranks, accumulated and unscaled by now."""
        self.checks.used.note(self.context.step)
        with torch.no_grad():  # with a policy the plugin is a mutator, whose hooks run in the training's modes
            result = self.scan.gradients(optimizer)
            self.recorder.step(optimizer, self.scan.largest)
            self.is_skipping = self.policy.may_skip(optimizer) and is_bad(result)
            found_inf = peek(optimizer, "found_inf")
            flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
            number, is_first = self.optimizers.meet(optimizer)
            if not (result or flag or self.undecided) and self.judge.is_calm and self.queue.is_empty:
                return
            grads = gradients_of(optimizer)
            self._judge_optimizer(self._decide, optimizer, number, grads, result, flag, is_first=is_first)
        if self.is_skipping:
            self.policy.skip(optimizer)

    def _judge_optimizer(  # noqa: PLR0913, PLR0917
        self,
        judge: Callable[[Event], None],
        optimizer: Optimizer | None,
        number: int,
        grads: GradientsById,
        result: Result,
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
            result: of their check.
            flag: infinity if the optimizer was given `found_inf`, else 0; empty if it takes none.
            is_first: this is the optimizer's first step.
        """
        is_certain = self.checks.backwards.latest == self.context.step
        event = self.checks.event("grad", "", optimizer=number, is_first_step=is_first, is_certain=is_certain)
        if result and not self.findings.is_over:  # expensive, and reported only once
            if isinstance(result, list):
                judge = partial(self._judge_named, judge, holders=list(grads))
            else:
                event = self.blame.gradient(event, optimizer)
                result = event.kind or result
        self.queue.submit(judge, event, result, self.scan(flag))

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
            for bad in self.undecided or [event]:
                self.findings.count(bad)
        self.findings.report_as_found(self.judge.step(event, found_inf=bool(event.inputs)))
        self._count_skipped(skipped)
        if not self.judge.is_suspicious:
            self.undecided.clear()
        if is_used and not self.is_skipping:
            self.findings.gradients_used()

    def step_post(self) -> None:
        """End the step: forget what belongs to it."""
        self.stepping = None
        self.scan.is_strict = self.scan.is_strict or self.checks.used.latest != self.context.step
        self._hold_gates(is_over=True)
        self.judge.pending.clear()

    def _hold_gates(self, *, is_over: bool) -> None:
        """Check the gradients in every step while something is suspicious or needs them; else as the budget allows.

        Args:
            is_over: this is the end of a step; only there is checking every step called off.
        """
        self.was_scaled = self.was_scaled or self.is_scaled
        is_suspicious = bool(self.undecided) or not self.judge.is_calm
        is_wanted = self.was_scaled or self.has_closure or (is_suspicious and not self.findings.is_over)
        if is_wanted or is_over:
            self.context.hold(1 if is_wanted else None, *GATES)
        self.was_scaled = self.was_scaled and not is_over
