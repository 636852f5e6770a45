"""Publish the learning rates of optimizers, and find one that is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from torch import Tensor

from hookd import Context, groups_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

OPTIMIZERS, GROUPS = 8, 32
"""Of more, no rates are published; `hookd_optimizer` has an option for the number of groups."""


class Rates:
    """Reads the learning rates at an optimizer's step, before a scheduler changes them.

    Args:
        see: takes one sample of a finding, see `Findings`.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._rate = context.gauge("rate", "Learning rate at the last sampled step.", ["optimizer", "group"])
        self._shown: dict[str, int] = {}  # by label: the number of groups that have series

    def step_begins(self, optimizer: Optimizer) -> None:
        """Publish the rates of an optimizer, and look whether all of them are 0."""
        groups = [group for group in groups_of(optimizer) if group["params"]]
        rates = [rate_of(group) for group in groups]
        labels = self._labels()
        for label in self._shown.keys() - labels.values():  # it is gone
            self._publish(label, [])
            del self._shown[label]
        if id(optimizer) in labels:
            self._publish(labels[id(optimizer)], rates[:GROUPS])
        if rates and None not in rates:
            kind = type(optimizer).__name__
            message = f"the learning rate of {kind} is 0, so nothing changes: look at the scheduler, and at `lr`"
            self._see("zero_lr", f"{kind} {id(optimizer)}", "" if any(rates) else message)

    def _labels(self) -> dict[int, str]:
        """Return the class of each optimizer, by its id; that of a second one begins with its number."""
        kinds = [(id(one), type(one).__name__) for one in self._context.optimizers()[:OPTIMIZERS]]
        return {key: kind if number == 1 else f"#{number}.{kind}" for number, (key, kind) in enumerate(kinds, 1)}

    def _publish(self, label: str, rates: list[float | None]) -> None:
        for group in range(len(rates), self._shown.get(label, 0)):
            self._rate.remove(label, str(group))
        self._shown[label] = len(rates)
        for group, rate in enumerate(rates):
            if rate is not None:
                self._rate.labels(label, str(group)).set(rate)


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a group; None if it has none, or if it is on a device."""
    rate: Any = group.get("lr")
    is_known = type(rate) in (int, float) or (type(rate) is Tensor and rate.is_cpu)
    return float(rate) if is_known else None
