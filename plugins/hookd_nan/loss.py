"""Check losses, and find out what became of the gradients of the previous backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hookd import of_tensor
from hookd import tensors as tensors_in
from hookd_nan.scan import is_scaled, on_host

if TYPE_CHECKING:
    from hookd import Context
    from hookd_nan.backward import Fates
    from hookd_nan.findings import Checks, Findings
    from hookd_nan.judge import Event, Judge
    from hookd_nan.optimizers import Optimizers
    from hookd_nan.pending import Queue
    from hookd_nan.recorder import Recorder
    from hookd_nan.scan import Scan


@dataclass
class Losses:
    """Checks losses."""

    context: Context
    scan: Scan
    checks: Checks
    judge: Judge
    queue: Queue
    findings: Findings
    fates: Fates
    optimizers: Optimizers
    recorder: Recorder

    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Check the loss, and find out what became of the gradients of the previous backward."""
        number = self.recorder.loss(tensors)
        self.checks.gates.note(self.context.step)
        self.fates.scaled = any(is_scaled(of_tensor(tensor, "grad_fn")) for tensor in tensors_in(tensors))
        is_good = isinstance(number, float) and math.isfinite(number) and len(tensors) == 1
        found = "" if is_good else self.scan(tensors_in(tensors))
        masked = self._masked() if found and not self.scan.neginf and not self.findings.is_over else []
        cleared, is_clear = self._cleared() if self._is_waiting() else (set(), False)
        if found or cleared or is_clear:
            event = self.checks.event("loss", "", self.checks.gates)
            event = event.having(neginf_in=masked) if masked else event
            judge = partial(self._judge_loss, cleared=cleared, is_clear=is_clear)
            self.queue.submit(judge, event, found)
        self.fates.hold_gates(is_over=False)
        self.context.listen("loss_done", wanted=self.fates.scaled or self.judge.is_suspicious)

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
        self.findings.count(event)
        skipped = self.judge.skipped
        origin = self.judge.loss(event, cleared=cleared, is_clear=is_clear)
        self.findings.report(origin)
        self.fates.count_skipped(self.judge.skipped - skipped)

    def _cleared(self) -> tuple[set[int], bool]:
        """Return the optimizers that hold no bad gradient any more, and whether no bad gradient is left at all.

        If some are left, the training is still accumulating gradients.
        """
        if self.queue.entries and not self._is_any_unknown():
            having = self.optimizers.having()
            return self.optimizers.numbers() - having, not having
        grads = self.optimizers.by_optimizer()
        if self.queue.entries:  # which gradients were bad is not known yet
            return self.optimizers.numbers() - set(grads), not grads
        bad = {number for number, found in grads.items() if self.scan.many(list(found.values()))}
        return {*self.judge.suspects, *self.judge.settled} - bad, not bad

    def _is_any_unknown(self) -> bool:
        """Whether gradients that no known optimizer holds may be bad; finding them means a search of all models."""
        waiting = (entry.event for entry in self.queue.entries)
        is_asked = any(event.where == "grad" and not event.optimizer for event in waiting)
        return is_asked or self.judge.is_suspicious or 0 in self.judge.settled or not self.optimizers.knows_any

    def _is_waiting(self) -> bool:
        """Whether there may have been bad gradients, so that their fate must be found out."""
        return self.judge.is_suspicious or bool(self.judge.settled or self.queue.entries)
