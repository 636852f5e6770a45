"""Faults by which a model does not learn, each with what hookd must say of it: `python -m tests.faults.learning`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from hookd.api.inprocess import DEFAULT
from tests.faults.learning import losses_and_updates, more_trainings, trainings
from tests.support.agent import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.wire.incident import Incident

STEP_NS = 35_000_000
HEALTHY_STEPS = 2000


class Fault(NamedTuple):
    """A training with a mistake.

    Attributes:
        train: does the steps; its docstring says what is wrong.
        kind: of the incident.
        within: the number of steps after which it is found at the latest.
        since: the step at which the mistake takes effect.
        module: that the incident names, if any.
    """

    train: Callable[..., None]
    kind: str
    within: int
    since: int = 0
    module: str = ""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.train.__name__


FAULTS = [
    Fault(trainings.head_alone, "not_optimized", 60),
    Fault(trainings.layer_added_later, "not_optimized", 60),
    Fault(trainings.old_model, "no_gradients", 50),
    Fault(trainings.loss_of_a_constant, "no_gradients", 50),
    Fault(trainings.zero_rate, "zero_lr", 50),
    Fault(trainings.never_cleared, "not_cleared", 200),
    Fault(trainings.eval_after_validation, "eval_mode", 50),
    Fault(trainings.dropout_off, "eval_mode", 50),
    Fault(trainings.large_embedding, "out_of_range", 20),
    Fault(trainings.rate_too_large, "diverging", 20, since=60),
    Fault(trainings.detached, "unchanged", 250),
    Fault(trainings.weights_copied_back, "unchanged", 50),
    Fault(trainings.masked_update, "unchanged", 50, module="head"),
    Fault(trainings.dead_units, "dead", 500, since=60, module="1"),
    Fault(more_trainings.cleared_too_late, "no_gradients", 50),
    Fault(more_trainings.wrapped_loss, "no_gradients", 50),
    Fault(more_trainings.parameter_replaced, "not_optimized", 60),
    Fault(more_trainings.plain_list, "not_optimized", 60),
    Fault(more_trainings.schedule_over, "zero_lr", 50, since=60),
    Fault(more_trainings.warmup_from_nothing, "zero_lr", 50),
    Fault(more_trainings.block_without_gradients, "unchanged", 250),
    Fault(more_trainings.unscaled_inputs, "saturated", 500, module="1"),
    Fault(more_trainings.too_deep_for_sigmoids, "vanishing", 500),
    Fault(more_trainings.log_of_nothing, "inf", 1, since=60),
    Fault(more_trainings.root_of_nothing, "nan", 1, since=60),
    Fault(more_trainings.constant_batch, "nan", 1, since=60),
    Fault(more_trainings.unclipped_recurrence, "loss_spike", 20, since=60),
    Fault(more_trainings.half_overflow, "nan", 20),
    Fault(more_trainings.frozen_statistics, "batchnorm_eval", 50),
    Fault(losses_and_updates.softmax_before_cross_entropy, "loss_input", 50),
    Fault(losses_and_updates.sigmoid_before_logits, "loss_input", 50),
    Fault(losses_and_updates.likelihood_of_probabilities, "loss_input", 50),
    Fault(losses_and_updates.likelihood_of_logits, "loss_input", 50),
    Fault(losses_and_updates.one_class, "loss_input", 50),
    Fault(losses_and_updates.cut_logits, "loss_input", 50),
    Fault(losses_and_updates.column_and_row, "loss_input", 50),
    Fault(losses_and_updates.column_and_row_of_mse, "loss_input", 50),
    Fault(losses_and_updates.no_step, "no_step", 100),
    Fault(losses_and_updates.clipped_to_nothing, "no_update", 100),
    Fault(losses_and_updates.rate_halved_each_step, "no_update", 250, since=60),
    Fault(losses_and_updates.weight_of_the_loss_gone, "no_update", 200, since=60),
    Fault(losses_and_updates.underflow_in_half, "no_update", 100),
    Fault(losses_and_updates.rounded_away, "no_update", 100),
    Fault(losses_and_updates.zeros_everywhere, "dead", 50, module="1"),
    Fault(losses_and_updates.relu_at_the_end, "dead", 50, module="3"),
    Fault(losses_and_updates.wrong_optimizer_cleared, "not_cleared", 200),
    Fault(losses_and_updates.prediction_in_between, "eval_mode", 50),
    Fault(losses_and_updates.climbing, "exploding", 150),
    Fault(losses_and_updates.still_scaled, "inf", 20),
    Fault(losses_and_updates.masked_row, "nan", 1, since=60),
    Fault(losses_and_updates.empty_mask, "nan", 1, since=60),
    Fault(losses_and_updates.branch_not_taken, "nan", 1, since=60),
    Fault(losses_and_updates.adam_without_epsilon, "nan", 5),
    Fault(losses_and_updates.exponential_of_everything, "nan", 1, since=60),
]


def play(fault: Fault, *, is_wrong: bool, steps: int) -> list[Incident]:
    """Train with the default plugins, at their default rates, in steps of 35 ms; return all incidents."""
    clock = _Clock()

    def counted() -> Iterator[int]:
        for step in range(1, steps + 1):
            yield step
            clock.now += STEP_NS

    torch.manual_seed(0)
    with running(*DEFAULT, clock=clock) as agent:
        fault.train(counted(), is_wrong=is_wrong)
        return agent.read().incidents


class _Clock:
    """Stands still within a step."""

    now = STEP_NS

    def __call__(self) -> int:
        return self.now
