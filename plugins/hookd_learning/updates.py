"""Find optimizers whose steps change nothing, and trainings that never make one."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from hookd import Context, groups_of, of_tensor, parameters_in, peek
from hookd_learning.losses import is_satisfied
from hookd_learning.rates import rate_of
from hookd_learning.samples import beginning, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

    from hookd import Summary

PARAMETERS, ELEMENTS = 16, 64
"""Parameters of an optimizer or a model that are read, evenly spread, and the first elements that are read of each."""
SUSPECTED, CERTAIN = 3, 3
"""Samples in a row in which these elements have not changed before all elements are read; samples of those that report it. A
GradScaler skips the first steps until it has found its scale."""
REST = 6
"""Samples in which parameters that have changed are not read, before they are read again: a training may come to a halt later."""
MODELS = 4
"""Models that are read while no optimizer has made a step."""


class Values:
    """The values of some parameters, from one sample to the next.

    Attributes:
        ref: the optimizer or the model that has them.
        have_changed: whether two samples differed since they were last forgotten.
        step: of the last sample.
        same: number of samples since the first one that were equal to the one before.
        has_gradient: whether any element of their gradients was not 0, in the last sample.
    """

    def __init__(self, owner: object) -> None:
        self.ref = weakref.ref(owner)
        self.have_changed = False
        self.step = 0
        self.same = 0
        self.has_gradient = False
        self._before: tuple[Any, list[Any]] | None = None
        self._rested = 0

    def rest(self) -> None:
        """Leave out one sample of parameters that have changed; after `REST` of them, forget that they have."""
        self._rested += 1
        if self._rested >= REST:
            self.have_changed, self.same, self._before, self._rested = False, 0, None, 0

    def read(self, context: Context, parameters: list[Any], judge: Callable[[], None]) -> None:
        """Read parameters and gradients; `judge` is called when their numbers are there."""
        gradients = [of_tensor(p, "grad") for p in parameters]
        if self.same < SUSPECTED:
            read = [beginning(tensor, ELEMENTS) for tensor in (*parameters, *gradients)]
            sizes = [one.numel() for one in read[: len(parameters)]]

            def arrived(numbers: list[float]) -> None:
                count = sum(sizes)
                self._take(sizes, numbers[:count], has_gradient=any(numbers[count:]))
                judge()

            context.later(read, arrived)
            return
        found: list[Summary] = []

        def summarized(summary: Summary) -> None:
            found.append(summary)
            if len(found) == 2 * len(parameters):
                of_gradients = found[len(parameters) :]
                has_gradient = any(one.norm != 0 for one in of_gradients)
                self._take("summaries", found[: len(parameters)], has_gradient=has_gradient)
                judge()

        for tensor in (*parameters, *gradients):
            context.summary(tensor, summarized)

    def _take(self, kind: Any, numbers: list[Any], *, has_gradient: bool) -> None:
        before, self._before = self._before, (kind, numbers)
        self.has_gradient = has_gradient
        if before is not None and before[0] == kind:
            if before[1] == numbers:
                self.same += 1
            else:
                self.have_changed = True

    @property
    def are_constant(self) -> bool:
        """Whether nothing changes them, for all that is known."""
        return not self.have_changed and self.same >= SUSPECTED + CERTAIN - 1


class Updates:
    """Compares the values of parameters from one sampled step to the next, and with pauses once they have changed.

    Args:
        see: takes a sample of a finding: kind, what it is about, message, fields.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._values: dict[int, Values] = {}  # by the id of an optimizer or a model
        self._is_satisfied = False  # whether gradients of 0 are the loss's own
        self._without_steps: set[str] = set()  # names of models for which that is reported
        self._due: set[int] = set()  # ids of the models that are read when this backward is over
        self._cleared: dict[
            int, bool
        ] = {}  # by the id of a model: whether its gradients were, before the last known backward

    def _of(self, owner: object) -> Values:
        values = self._values.get(id(owner))
        if values is None or values.ref() is not owner:
            values = self._values[id(owner)] = Values(owner)
        return values

    def step_begins(self, optimizer: Optimizer) -> None:
        """Read parameters that an optimizer is about to change, and their gradients."""
        while self._without_steps:
            self._see("no_step", self._without_steps.pop(), "")
        values = self._of(optimizer)
        if values.have_changed:
            values.rest()
            return
        groups = [group for group in groups_of(optimizer) if rate_of(group) != 0]
        if found := self._readable(p for group in groups for p in group["params"]):
            kind, dtype = type(optimizer).__name__, str(of_tensor(found[0], "dtype")).removeprefix("torch.")
            values.read(self._context, found, partial(self._judge_optimizer, values, kind, dtype))

    def _judge_optimizer(self, values: Values, kind: str, dtype: str) -> None:
        message = f"the steps of {kind} change none of its parameters: "
        if values.has_gradient:
            message += f"the updates are too small to change numbers in {dtype}. Raise the learning rate, and look at its scheduler"
            message += "" if dtype in ("float32", "float64") else ", or keep the parameters in float32"
        else:
            message += "the gradients are all 0. Is the loss weighted with 0? Are they clipped to a norm of 0, or too small for float16 without a GradScaler?"
        is_wrong = values.are_constant and (values.has_gradient or not self._is_satisfied)
        self._see("no_update", f"{kind} {id(values.ref())}", message if is_wrong else "", patience=1)

    def _readable(self, parameters: Iterable[Any]) -> list[Any]:
        """Return some parameters that have a gradient, of one device."""
        found = [p for p in parameters if of_tensor(p, "requires_grad") and of_tensor(p, "grad") is not None]
        chosen = [
            p
            for p in spread(found, PARAMETERS)
            if self._context.is_readable(p) and self._context.is_readable(of_tensor(p, "grad"))
        ]
        return [p for p in chosen if of_tensor(p, "device") == of_tensor(chosen[0], "device")]

    # -- no optimizer has made a step yet

    def backward_begins(self, losses: Sequence[Any]) -> None:
        """Note whether gradients have been cleared: otherwise they may be accumulated for a step that is still to come."""
        self._is_satisfied = bool(losses) and all(map(is_satisfied, losses))
        self._due.clear()
        if self._context.optimizers():
            return
        for _, model in self._context.models()[:MODELS]:
            if peek(model, "training") is True and not self._of(model).have_changed:
                self._due.add(id(model))
                if found := self._readable(p for _, p in parameters_in(model)):
                    read = [beginning(of_tensor(p, "grad"), ELEMENTS) for p in found]
                    self._context.later(read, partial(self._note_cleared, id(model)))
                else:
                    self._cleared[id(model)] = True

    def _note_cleared(self, model: int, numbers: list[float]) -> None:
        self._cleared[model] = not any(numbers)

    def backward_over(self) -> None:
        """Read the parameters of models that have got gradients."""
        if not self._due:
            return
        for root, model in self._context.models()[:MODELS]:
            values = self._of(model)
            if id(model) in self._due and values.step != self._context.step:
                values.step = self._context.step
                if found := self._readable(p for _, p in parameters_in(model)):
                    values.read(self._context, found, partial(self._judge_model, values, root.name))

    def _judge_model(self, values: Values, name: str) -> None:
        is_wrong = values.are_constant and self._cleared.get(id(values.ref()), False)
        message = (
            f"the gradients of {self._context.described(name)} are computed and cleared, but nothing changes its parameters: no optimizer "
            "has made a step. Is optimizer.step() called?"
        )
        if is_wrong:
            self._without_steps.add(name)
        self._see("no_step", name, message if is_wrong else "", patience=1, module=name)

    def clear(self) -> None:
        """Forget the optimizers and models."""
        self._values.clear()
        self._due.clear()
        self._cleared.clear()
