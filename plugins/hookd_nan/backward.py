"""Check the gradients between modules, and keep the bad ones until it is known whether an optimizer uses them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hookd import tensors as tensors_in

if TYPE_CHECKING:
    from hookd import Context, Module
    from hookd_nan.findings import Checks, Findings
    from hookd_nan.judge import Event, Judge
    from hookd_nan.pending import Queue
    from hookd_nan.scan import Scan


class Fates:
    """Bad gradients whose fate is unknown, and whether every step's gradients are checked because of them.

    Args:
        hooks: the hooks that check the gradients that an optimizer is about to use.

    Attributes:
        undecided: bad gradients, not counted until their fate is known.
        scaled: the last loss looked scaled by a GradScaler.
        has_closure: an optimizer calls a closure: gradients are made and used in the same step.
    """

    def __init__(self, context: Context, judge: Judge, hooks: tuple[str, ...]) -> None:
        self._context, self._judge, self._hooks = context, judge, hooks
        self._skipped = context.counter("amp_skipped_steps", "Optimizer steps skipped for overflowed gradients.")
        self._skipped.inc(0)  # so that the series is there from the start
        self.undecided: list[Event] = []
        self.scaled = self._was_scaled = False  # _was_scaled: any loss since the last step looked scaled
        self.has_closure = False

    def succeed(self, predecessor: Fates) -> None:
        """Take over the undecided gradients of a predecessor."""
        self.undecided, self.has_closure = predecessor.undecided, predecessor.has_closure
        self.scaled, self._was_scaled = predecessor.scaled, predecessor._was_scaled  # noqa: SLF001

    def count_skipped(self, steps: int) -> None:
        """Count skipped steps; their bad gradients were discarded."""
        if steps:
            self._skipped.inc(steps)
            self.undecided.clear()

    def hold_gates(self, *, is_over: bool) -> None:
        """Check the gradients in every step while something is suspicious or needs them; else as the budget allows.

        Args:
            is_over: this is the end of a step; only there is checking every step called off.
        """
        self._was_scaled = self._was_scaled or self.scaled
        needs = self._was_scaled or self.has_closure
        is_wanted = needs or bool(self.undecided) or not self._judge.is_calm
        if is_wanted or is_over:
            self._context.hold(1 if is_wanted else None, *self._hooks)
        self._was_scaled = self._was_scaled and not is_over


@dataclass
class Backward:
    """Checks the gradients between modules."""

    context: Context
    scan: Scan
    checks: Checks
    judge: Judge
    queue: Queue
    findings: Findings
    fates: Fates
    _reached: dict[int, int] = field(default_factory=dict)
    """By module.id: the value of `order` when a gradient last reached it."""

    def succeed(self, predecessor: Backward) -> None:
        """Take over which modules gradients have reached."""
        self._reached = predecessor._reached  # noqa: SLF001

    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Record the order in which gradients reach the modules; check those that reach a container."""
        self.checks.order += 1
        self._reached[module.id] = self.checks.order
        if not module.depth:
            self.checks.backwards.note(self.context.step)
        if not module.leaf and not self.findings.is_over:
            self._look_at_gradient(module, grad_output, grad_output)

    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Check the gradient that leaves the module; if none does, or if it is bad, also the one that reached it."""
        if not self.findings.is_over:  # later bad gradients are consequences; the outputs show how far they spread
            self._look_at_gradient(module, grad_input, grad_output)

    def _look_at_gradient(self, module: Module, leaves: tuple[Any, ...], reached: tuple[Any, ...]) -> None:
        found = self.scan(tensors_in(leaves) or tensors_in(reached))
        if found:
            reached_at = self._reached.get(module.id, 0)
            event = self.checks.event("grad", module.name, self.checks.backwards, reached=reached_at)
            self.queue.submit(self._judge_gradient, event, found, self.scan(tensors_in(reached)))

    def _judge_gradient(self, event: Event) -> None:
        """Judge a module's gradient.

        If a bad gradient reached the module, its arrival counts as the time of the event; if the module made it, the
        check does. A container is reached before the modules in it.
        """
        if event.inputs:
            event = replace(event, order=event.reached)
        if event.kind:
            self.fates.undecided.append(event)
            self.judge.flow(event)
            self.context.listen("loss_done", wanted=True)
