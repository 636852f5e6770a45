"""Publish the loss as metrics: of the last step, and as a sum and a count for the mean of any interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hookd import Context, of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BACKWARDS = 4
"""Series of each metric. A step with gradient accumulation has one backward for each part of the batch."""
PATIENCE = 64
"""Steps without a backward after which its series ends. A skipped step makes the next backward a second one, once."""
NODES = 4
"""Nodes of the graph, from the loss on, in which its division is looked for: a loss scale and a cast may lie above it."""


class Step:
    """The losses of one step, by backward.

    Attributes:
        values: the losses, None until they have arrived from their device.
        divisors: the number by which each was divided at last; 1 if it is unknown.
        is_over: whether no further backward belongs to the step.
    """

    def __init__(self) -> None:
        self.values: list[float | None] = []
        self.divisors: list[float] = []
        self.is_over = False

    def shown(self) -> list[float]:
        """Return the losses to publish.

        If each of n losses was divided by n, they are the parts of a mean: the trainer's loss is their sum. Others are published
        one by one, as they are.
        """
        known = [value for value in self.values if value is not None]
        is_mean = len(known) > 1 and all(divisor == len(known) for divisor in self.divisors)
        return [sum(known)] if is_mean else known[:BACKWARDS]


class Loss:
    """Publishes each loss at once, one that was divided when its step is over; under a GradScaler it has the scale as a factor."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gauge = context.gauge(
            "loss",
            "Loss of the last step's backward; the sum of n losses if each was divided by n.",
            ["backward"],
        )
        self._sums = context.gauge(
            "cumulative_loss", "Sum of the finite losses of all steps since the attach.", ["backward"]
        )
        self._counts = context.counter("losses", "Number of losses in cumulative_loss.", ["backward"])
        self._series: list[tuple[Any, Any, Any]] = []
        self._totals = [0.0] * BACKWARDS
        self._step = Step()
        self._idle = 0  # steps that have published fewer losses than before

    def begin(self, loss: Tensor) -> Callable[[float], None]:
        """Begin a backward from a loss, and return the function that takes its value, once that has arrived."""
        step, place = self._step, len(self._step.values)
        step.values.append(None)
        step.divisors.append(_divisor(self._context, loss))

        def arrived(value: float) -> None:
            step.values[place] = value
            if step.divisors[place] == 1.0 and place < BACKWARDS:  # perhaps no optimizer follows: it may be NaN
                self._show(place, value)
            self._publish(step)

        return arrived

    def end_step(self) -> None:
        """End a step; the last series ends after PATIENCE steps that have published fewer losses."""
        step, self._step = self._step, Step()
        step.is_over = True
        if step.values:
            self._publish(step)
        else:
            self._forget(0)

    def _publish(self, step: Step) -> None:
        if not step.is_over or None in step.values:
            return
        losses = step.shown()
        for place, loss in enumerate(losses):
            self._show(place, loss)
            if math.isfinite(loss):  # a NaN would stay in the sum
                _, total, count = self._series[place]
                self._totals[place] += loss
                total.set(self._totals[place])
                count.inc()
        self._forget(len(losses))

    def _show(self, place: int, loss: float) -> None:
        while place >= len(self._series):
            at = str(len(self._series))
            self._series.append((self._gauge.labels(at), self._sums.labels(at), self._counts.labels(at)))
        self._series[place][0].set(loss)

    def _forget(self, losses: int) -> None:
        self._idle = self._idle + 1 if losses < len(self._series) else 0
        if self._idle >= PATIENCE:
            self._series.pop()
            for family in (self._gauge, self._sums, self._counts):
                family.remove(str(len(self._series)))
            self._totals[len(self._series)] = 0.0
            self._idle = 0


def _divisor(context: Context, loss: Tensor) -> float:
    """Return the number by which a loss was divided at last, or multiplied with its inverse; 1 if none is found.

    A number of Python's is kept in the graph as a tensor in host memory.
    Source: torch/csrc/autograd, `DivBackward0` and `MulBackward0`, 2.14.
    """
    node: Any = of_tensor(loss, "grad_fn")
    divisor = 1.0
    for _ in range(NODES):
        kind = node.name() if node is not None else ""
        if kind not in ("DivBackward0", "MulBackward0", "ToCopyBackward0"):
            break
        if kind != "ToCopyBackward0" and (other := _other(context, node)):
            divisor *= other if kind == "DivBackward0" else 1.0 / other
        node = node.next_functions[0][0]
    return round(divisor, 6)


def _other(context: Context, node: Any) -> float | None:
    """Return the second operand of a division or a product if it is a number of Python's, else None."""
    try:
        other = node._saved_other  # noqa: SLF001 - the graph has no other way
    except RuntimeError:  # it was modified since, or the graph is freed
        return None
    is_number = other is not None and not other.dim() and str(other.dtype) in ("torch.float64", "torch.int64")
    return context.number(other) if is_number else None
