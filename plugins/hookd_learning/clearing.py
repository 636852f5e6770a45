"""Find gradients that are never cleared: each backward adds to those of all steps before."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hookd import Context, groups_of, of_tensor
from hookd_learning.samples import beginning, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

PARAMETERS = 4
"""Parameters of an optimizer whose gradients are looked at, evenly spread."""
ELEMENTS = 64


class Record:
    """The state of an optimizer's gradients in one sampled step.

    Attributes:
        backwards: how many backwards have begun.
        is_cleared: whether all gradients were gone or 0 when one of them began.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.ref = weakref.ref(optimizer)
        self.backwards = 0
        self.is_cleared = False

    def take(self, numbers: list[float]) -> None:
        """Take elements of the gradients at the beginning of a backward."""
        self.is_cleared |= not any(numbers)


class Clearing:
    """Looks at gradients when a backward begins. In every step, one backward has to find an optimizer's gradients cleared.

    Args:
        see: takes a sample of a finding: kind, what it is about, message.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._open: dict[int, Record] = {}  # by the optimizer's id
        self._over: list[Record] = []  # their numbers may be on their way from a device

    def backward_begins(self, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients of all optimizers."""
        self._judge()
        for optimizer in optimizers:
            record = self._open.get(id(optimizer))
            if record is None or record.ref() is not optimizer:
                record = self._open[id(optimizer)] = Record(optimizer)
            record.backwards += 1
            if not record.is_cleared:
                self._sample(record, spread([p for group in groups_of(optimizer) for p in group["params"]], PARAMETERS))

    def _sample(self, record: Record, parameters: Sequence[Any]) -> None:
        found = [grad for p in parameters if (grad := of_tensor(p, "grad")) is not None]
        gradients = [beginning(grad, ELEMENTS) for grad in found if self._context.is_readable(grad)]
        if gradients:
            self._context.later(gradients, record.take)
        else:
            record.is_cleared = True  # there are none, or it cannot be known

    def step_over(self, optimizer: Optimizer) -> None:
        """Keep the record of a step until its numbers are there."""
        record = self._open.pop(id(optimizer), None)
        if record is not None and record.ref() is optimizer and record.backwards:
            self._over.append(record)

    def _judge(self) -> None:
        """Judge the records of earlier sampled steps, whose numbers have arrived."""
        over, self._over = self._over, []
        for record in over:
            if (optimizer := record.ref()) is not None:
                kind = type(optimizer).__name__
                message = (
                    f"the gradients of {kind} are not cleared between steps, so each step uses the sum of all gradients so far: "
                    "call optimizer.zero_grad() once per step"
                )
                self._see("not_cleared", f"{kind} {id(optimizer)}", "" if record.is_cleared else message)

    def clear(self) -> None:
        """Forget the optimizers."""
        self._open.clear()
        self._over.clear()
