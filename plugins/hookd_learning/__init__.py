"""Find out why a model does not learn: mistakes in what the optimizer, the gradients and the mode of the model are set to.

Each becomes an incident, once, and a series `hookd_learning_finding{kind}` that is 1 while it holds:

    not_optimized   parameters get gradients, but no optimizer has them, and they do not change
    no_gradients    none of an optimizer's parameters gets a gradient
    zero_lr         the learning rate of all groups of an optimizer is 0
    no_step         gradients are computed and cleared, but no optimizer makes a step, and nothing else changes the parameters
    no_update       the steps of an optimizer change nothing: the gradients are 0, or the updates too small for the numbers' type
    loss_input      the loss gets something else than it expects: the output of a softmax instead of logits, or of another shape
    not_cleared     gradients are still there when the next step's backward begins, so they add up from step to step
    out_of_range    the values of a parameter have a standard deviation above 100, as after a wrong initialization
    eval_mode       the model is trained in `eval()`, or its Dropout is, while the rest is in `train()`

Beside them the learning rates are published, as of the last sampled step:

    hookd_learning_rate{optimizer,group}    of each group, before a scheduler changes it; `optimizer` is the class, for a second
                                            optimizer it begins with `#2.` (eight at most, with 32 groups each)

A finding needs several sampled steps in a row that show it, `patience` (3) of them. One step in `every` (10) is sampled.

Limits: `not_optimized` looks at models that are called in `train()`, and at optimizers of torch that have made a step; an optimizer that makes
its first step later withdraws it. The mode counts for modules of torch's own classes (Dropout, BatchNorm and their kin), and only
if the optimizer changes parameters of the same model.

Options: `every=N`, `patience=N`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd import Alarm, Context, Plugin, hookimpl
from hookd_learning.clearing import Clearing
from hookd_learning.losses import Losses
from hookd_learning.modes import Modes
from hookd_learning.ownership import Ownership
from hookd_learning.rates import Rates
from hookd_learning.updates import Updates
from hookd_learning.values import Values

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Findings:
    """Reports each finding once, when enough samples in a row have shown it.

    Args:
        patience: samples in a row.
    """

    def __init__(self, context: Context, patience: int) -> None:
        self._context, self._patience = context, patience
        self._gauge = context.gauge("finding", "1 while the training shows this finding.", ["kind"])
        self._alarms: dict[tuple[str, str], Alarm] = {}
        self._reported: set[tuple[str, str]] = set()

    def see(self, kind: str, what: str, message: str, patience: int = 0, **fields: object) -> None:
        """Take one sample of a finding about `what`; without a message it does not hold."""
        key = kind, what
        alarm = self._alarms.get(key)
        if alarm is None:
            if not message:
                return
            alarm = self._alarms[key] = Alarm(0, for_steps=patience or self._patience)
        was_on, starts = alarm.is_on, alarm.update(bool(message))
        if was_on != alarm.is_on:
            self._gauge.labels(kind).set(any(one.is_on for (of, _), one in self._alarms.items() if of == kind))
        if starts and key not in self._reported:
            self._reported.add(key)
            self._context.incident(kind, message, **fields)


class Learning(Plugin):
    """Compares what is trained with what the optimizers have, in one step of ten."""

    name = "learning"
    sampled = ("loss", "loss_done", "step_pre", "step_post")
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.findings = Findings(context, context.option("patience", 3, least=1))
        self.ownership = Ownership(context, self.findings.see)
        self.clearing = Clearing(context, self.findings.see)
        self.modes = Modes(context, self.findings.see)
        self.values = Values(context, self.findings.see)
        self.losses = Losses(self.findings.see)
        self.rates = Rates(context, self.findings.see)
        self.updates = Updates(context, self.findings.see)

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Look at the loss, the gradients and the modes before a backward."""
        self.losses.backward_begins(tensors)
        self.updates.backward_begins(tensors)
        self.clearing.backward_begins(self.context.optimizers())
        self.modes.backward_begins()

    @hookimpl
    def loss_done(self) -> None:
        """Look at the parameters after a backward, if no optimizer has made a step."""
        self.updates.backward_over()

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Look at the gradients and settings that the optimizer is about to use."""
        self.ownership.step_begins(optimizer)
        self.updates.step_begins(optimizer)
        self.rates.step_begins(optimizer)

    @hookimpl
    def step_post(self, optimizer: Optimizer) -> None:
        """Look for parameters that no optimizer has."""
        self.clearing.step_over(optimizer)
        self.modes.step_over(optimizer)
        self.ownership.step_over(self.context.optimizers())
        self.values.step_over()
        self.losses.step_over()

    @hookimpl
    def unconfigure(self) -> None:
        """Release what belongs to the training."""
        self.ownership.clear()
        self.clearing.clear()
        self.modes.clear()
        self.updates.clear()
