"""The flight recorder: the last module calls before the first NaN, and the numbers of the last steps.

It keeps no tensor, and computes nothing before an incident. hookd keeps weak references to outputs; the numbers of those
that still exist (autograd keeps most of a forward's) are computed for the incident.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from hookd import groups_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookd import Context, Returned

STEPS, LARGEST = 8, 500


class StepNumbers(NamedTuple):
    """The numbers of a step, with the names that an incident has for them; None for those that are not known."""

    step: int
    loss: float | None
    largest_gradient: float | None = None
    lr: float | None = None


class CallNumbers(TypedDict, total=False):
    """A module call, and its output if that still exists."""

    module: str
    min: float | str
    max: float | str
    norm: float | str
    is_changed: bool  # the output was changed in place since then


class Recorder:
    """The last calls and the last steps.

    Attributes:
        seen: the last calls whose outputs were on a device, each as (module name, smallest element, largest element).
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._length = context.option("recorder", 20, least=0, most=LARGEST)
        self.seen: deque[tuple[str, float, float]] = deque(maxlen=self._length)
        self.steps: deque[StepNumbers] = deque(maxlen=STEPS)
        self.last_loss: float | None = None
        self.loss_step = 0

    def loss(self, tensors: tuple[Any, ...]) -> float | None:
        """Record the loss and return it; None if it is not a number in host memory."""
        if (
            self.last_loss is not None and self.loss_step != self._context.step
        ):  # a step whose gradients were not checked
            self.steps.append(StepNumbers(self.loss_step, self.last_loss))
        self.last_loss, self.loss_step = self._context.number(tensors[0]) if tensors else None, self._context.step
        return self.last_loss

    def step(self, optimizer: Optimizer, largest: float | None) -> None:
        """Record the loss, the largest gradient magnitude and the learning rate of a step; of several closures the last."""
        if self.steps and self.steps[-1].step == self._context.step:
            self.steps.pop()
        groups = groups_of(optimizer)
        rate = groups[0].get("lr") if groups else None
        rate = rate if isinstance(rate, (int, float)) else None
        self.steps.append(StepNumbers(self._context.step, self.last_loss, largest, rate))
        self.last_loss = None

    def contents(self, at: int | None) -> dict[str, Any]:
        """Return the fields for an incident: the calls and the steps before it.

        Args:
            at: how many calls had returned before the incident; None for all that are remembered.
        """
        steps = [{k: number(v) for k, v in one._asdict().items() if v is not None} for one in self.steps]
        before = [_call(*one) for one in self.seen]
        if not before and self._length:
            before = [self._summarised(call) for call in list(self._context.returned())[:at][-self._length :]]
        return {"calls_before": before, "steps_before": steps}

    def _summarised(self, call: Returned) -> CallNumbers:
        tensor = call.ref()
        summary = None if tensor is None else self._context.summary(tensor)
        if tensor is None or summary is None:
            return {"module": call.module.name}
        numbers: CallNumbers = {**_call(call.module.name, summary.min, summary.max), "norm": number(summary.norm)}
        return {**numbers, "is_changed": True} if call.tensor() is None else numbers


def _call(name: str, low: float, high: float) -> CallNumbers:
    return {"module": name, "min": number(low), "max": number(high)}


def number(value: float) -> float | str:
    """Return a finite number rounded to 6 digits, a whole one as it is, and any other as its name, for JSON."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(float(value))
