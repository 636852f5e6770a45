"""Find parameters whose values are far out of range, as a wrong initialization leaves them."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from hookd import Context, Summary, name_within, of_tensor, parameters_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from hookd import Module

LARGE = 100.0
"""Standard deviation above which values are out of range. Usual initial values have at most 1; those of pretrained T5 models, 20."""
INITIAL = 1e5
"""Standard deviation above which values are the training's work, not an initialization."""
GROWN = 1.05
"""The same for values that have changed by more than this factor from one sample to the next."""
AT_ONCE, ELEMENTS = 16, 1 << 16
"""Number of parameters that are read in a sampled step, and of the elements of each that are read, the first ones."""


class Values:
    """Reads every parameter with several dimensions once, a few in each sampled step, and the bad ones again and again.

    Args:
        see: takes a sample of a finding: kind, what it is about, message, fields.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._read: dict[
            int, tuple[weakref.ref[nn.Module], int]
        ] = {}  # by id of a model: number of its parameters read
        self._bad: dict[str, float] = {}  # standard deviations at the first sample

    def step_over(self) -> None:
        """Read some parameters."""
        again = set(self._bad)
        for root, model in self._context.models():
            ref, done = self._read.get(id(model), (None, 0))
            if ref is None or ref() is not model:
                ref, done = weakref.ref(model), 0
            for name, parameter in islice(parameters_in(model), done, done + AT_ONCE):
                self._read_one(root, name, parameter)
                done += 1
            self._read[id(model)] = ref, done
            for name, parameter in parameters_in(model) if again else ():
                if name_within(root.name, name) in again:
                    self._read_one(root, name, parameter)

    def _read_one(self, root: Module, name: str, parameter: Tensor) -> None:
        if len(of_tensor(parameter, "shape")) < 2 or not self._context.is_readable(parameter):  # noqa: PLR2004
            return
        values = torch.Tensor.detach(parameter)
        if values.is_contiguous():
            values = values.view(-1)[:ELEMENTS]
        if values.numel() <= ELEMENTS:
            self._context.summary(values, partial(self._judge, root.name, name_within(root.name, name)))

    def _judge(self, root: str, name: str, summary: Summary) -> None:
        is_bad = summary.std > LARGE
        if not is_bad:
            self._bad.pop(name, None)
            self._see("out_of_range", name, "")
            return
        first = self._bad.setdefault(name, summary.std)
        message = f"the values of {name} have a standard deviation of {summary.std:,.0f}: "
        if summary.std > INITIAL or not 1 / GROWN < summary.std / first < GROWN:
            message += "the steps are far too large. Lower the learning rate, or clip the gradients"
        else:
            message += (
                "initial values usually have at most 1, and activations grow with it. Initialize it "
                "with less, as torch.nn.init does"
            )
        self._see("out_of_range", name, message, patience=2, module=root, parameter=name, std=summary.std)
