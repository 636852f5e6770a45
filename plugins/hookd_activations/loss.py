"""Publish the loss as metrics: of the last step, and as a sum and a count for the mean of any interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd import Context, of_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

BACKWARDS = 4
"""Series of each metric. A step with gradient accumulation has one backward for each part of the batch."""
PATIENCE = 64
"""Steps without a backward after which its series ends. A skipped step makes the next backward a second one, once."""
NODES = 4
"""Nodes of the graph, from the loss on, in which its division is looked for: a loss scale and a cast may lie above it."""
SUM = 2
"""A reduction of torch (torch/nn/_reduction.py)."""


@dataclass
class Division:
    """The division of a loss, as its graph has it.

    Attributes:
        divisor: the number by which it was divided at last; 1 if none is known.
        is_of_sum: whether a sum over targets was divided, as by cross_entropy with `reduction="sum"`.
        targets: the number of these targets, 0 while it is unknown.
        unread: tensors whose numbers are on a device: the number of targets, and a factor of the divisor if there is a second one.
    """

    divisor: float = 1.0
    is_of_sum: bool = False
    targets: float = 0.0
    unread: list[Tensor] = field(default_factory=list)

    def read(self, numbers: Sequence[float]) -> None:
        """Take the numbers of `unread`."""
        self.targets, *factors = numbers
        self.divisor *= math.prod(factors)
        self.unread = []


class Step:
    """The losses of one step, by backward.

    Attributes:
        values: the losses, None until they have arrived from their device.
        divisions: how each was divided.
        is_over: whether no further backward belongs to the step.
    """

    def __init__(self) -> None:
        self.values: list[float | None] = []
        self.divisions: list[Division] = []
        self.is_over = False

    def shown(self) -> list[float]:
        """Return the losses to publish.

        Parts of a mean are one: the trainer's loss is their sum. They are if each of n losses was divided by n, or if each is a sum
        over targets that was divided by the number of targets of all of them, rather than of its own (`num_items_in_batch` of
        transformers' Trainer). Others are published one by one, as they are.
        """
        known = [value for value in self.values if value is not None]
        is_mean = len(known) > 1 and (self._are_divided_by_their_number() or self._are_divided_by_all_targets())
        return [sum(known)] if is_mean else known[:BACKWARDS]

    @property
    def is_complete(self) -> bool:
        """Whether all has arrived, and no more will come."""
        return self.is_over and None not in self.values and not any(one.unread for one in self.divisions)

    def _are_divided_by_their_number(self) -> bool:
        return all(one.divisor == len(self.divisions) for one in self.divisions)

    def _are_divided_by_all_targets(self) -> bool:
        total = sum(one.targets for one in self.divisions)
        # Trainers count the targets before they are shifted by one, or on all ranks: it is the nearer of the two.
        return all(
            one.is_of_sum and one.targets and abs(one.divisor - total) < abs(one.divisor - one.targets)
            for one in self.divisions
        )


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
        division = _division(self._context, loss)
        step.divisions.append(division)
        if division.unread:
            self._read(step, division)

        def arrived(value: float) -> None:
            step.values[place] = value
            # Perhaps no optimizer follows: it may be NaN.
            if division.divisor == 1.0 and not division.is_of_sum and place < BACKWARDS:
                self._show(place, value)
            self._publish(step)

        return arrived

    def _read(self, step: Step, division: Division) -> None:
        """Read what a division has on a device."""

        def arrived(numbers: list[float]) -> None:
            division.read(numbers)
            self._publish(step)

        def lost() -> None:
            division.is_of_sum, division.unread = False, []
            self._publish(step)

        self._context.later(division.unread, arrived, lost)

    def end_step(self) -> None:
        """End a step; the last series ends after PATIENCE steps that have published fewer losses."""
        step, self._step = self._step, Step()
        step.is_over = True
        if step.values:
            self._publish(step)
        else:
            self._forget(0)

    def _publish(self, step: Step) -> None:
        if not step.is_complete:
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


def _division(context: Context, loss: Tensor) -> Division:
    """Return how a loss was divided at last, or multiplied with the inverse of a number.

    A number of Python's is kept in the graph as a tensor in host memory; a sum over targets keeps their number, or the sum of their
    weights. Source: torch/csrc/autograd, `DivBackward0`, `MulBackward0`, `NllLossBackward0`, 2.14.
    """
    node: Any = of_tensor(loss, "grad_fn")
    found, on_device = Division(), None
    for _ in range(NODES):
        kind = node.name() if node is not None else ""
        if kind not in ("DivBackward0", "MulBackward0", "ToCopyBackward0"):
            break
        if kind != "ToCopyBackward0" and (other := _saved(node, "other")) is not None:
            number = _number(context, other)
            if number:
                found.divisor *= number if kind == "DivBackward0" else 1.0 / number
            elif kind == "DivBackward0" and not other.dim() and on_device is None:
                on_device = other
        node = node.next_functions[0][0]
    if node is not None and node.name() in ("NllLossBackward0", "NllLoss2DBackward0"):
        _count_targets(context, node, found, on_device)
    found.divisor = round(found.divisor, 6)
    return found


def _count_targets(context: Context, node: Any, found: Division, on_device: Tensor | None) -> None:
    """Add the number of targets of a node to a division, or the tensors that have it."""
    targets = _saved(node, "total_weight")
    if targets is None or _saved(node, "reduction") != SUM or (found.divisor == 1.0 and on_device is None):
        return
    found.is_of_sum = True
    if on_device is None and (number := context.number(targets)) is not None:
        found.targets = number
    else:
        found.unread = [tensor.detach().reshape(1) for tensor in (targets, on_device) if tensor is not None]


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved; None if it has nothing of this name, or it was modified since, or the graph is freed."""
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None


def _number(context: Context, other: Tensor) -> float | None:
    """Return the second operand of a division or a product if it is a number of Python's, or one in host memory, else None."""
    is_number = not other.dim() and str(other.dtype) in ("torch.float64", "torch.int64")
    return context.number(other) if is_number else None
