"""The names of roots: which one is `(root)`, and what the others are called."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hookd import Plugin, hookimpl
from tests.support.agent import running

X = torch.ones(2, 4)


class Roots(Plugin):
    """Notes the roots that are called."""

    name = "roots"

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @hookimpl
    def forward(self, module):
        if not module.depth:
            self.seen.append((module.type, module.name))


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).sum().backward()
    optimizer.step()


def last_names(agent) -> dict[str, str]:
    return dict(agent.plugin("roots").seen)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_largest_model_that_is_trained_is_the_main_root_in_whatever_order_they_are_called(
    first: int, steps_before: int
) -> None:
    models = [Generator(nn.Linear(4, 8), nn.Linear(8, 1)), Discriminator(nn.Linear(4, 1))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(steps_before):
        step(models[0], optimizers[0])
        step(models[1], optimizers[1])
    with running(Roots) as agent:
        for _ in range(3):
            step(models[first], optimizers[first])
            step(models[1 - first], optimizers[1 - first])
        assert last_names(agent) == {"Generator": "(root)", "Discriminator": "#Discriminator.(root)"}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_larger_model_that_no_optimizer_holds_is_not_the_main_root(is_first: bool) -> None:
    student, teacher = Generator(nn.Linear(4, 1)), Discriminator(nn.Linear(4, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with running(Roots) as agent:
        for _ in range(3):
            if is_first:
                teacher(X)
            step(student, optimizer)
            if not is_first:
                teacher(X)
        assert last_names(agent) == {"Generator": "(root)", "Discriminator": "#Discriminator.(root)"}


def test_a_copy_of_the_weights_is_named_after_its_class() -> None:
    model = Generator(nn.Linear(4, 1))
    average, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Roots) as agent:
        average(X)
        step(model, optimizer)
        agent.plugin("roots").seen.clear()
        step(model, optimizer)
        average(X)
        assert agent.plugin("roots").seen == [("Generator", "(root)"), ("Generator", "#Generator.(root)")]


def test_a_loss_is_never_the_main_root_and_two_of_one_class_are_numbered() -> None:
    model, losses = Generator(nn.Linear(4, 1)), [nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss()]
    with running(Roots) as agent:
        for loss in losses:
            loss(torch.ones(2), torch.ones(2))
        model(X)
        kind = "BCEWithLogitsLoss"
        assert agent.plugin("roots").seen == [
            (kind, f"#{kind}.(root)"), (kind, f"#{kind}-2.(root)"), ("Generator", "(root)"),
        ]  # fmt: skip


def test_a_name_of_another_root_has_no_character_that_means_something_in_names() -> None:
    strange = type("a.b#c d", (nn.Sequential,), {})(nn.Linear(4, 1))
    with running(Roots) as agent:
        main = Generator(nn.Linear(4, 8))
        main(X)
        strange(X)
        assert agent.plugin("roots").seen[-1] == ("a.b#c d", "#a_b_c_d.(root)")


def test_series_of_a_main_root_that_turns_out_to_be_another_one_are_removed() -> None:
    class Counts(Roots):
        @hookimpl
        def configure(self, context):
            self.calls = context.counter("calls", "Calls.", ["module"])

        @hookimpl
        def forward(self, module):
            self.calls.labels(module.name).inc()

    helper, model = Discriminator(nn.Linear(4, 64)), Generator(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Counts) as agent:
        for _ in range(4):  # it turns out in the second step
            helper(X)
            step(model, optimizer)
        calls = agent.values("hookd_roots_calls")
        assert calls == {
            ("(root)",): 2.0, ("0",): 2.0, ("#Discriminator.(root)",): 2.0, ("#Discriminator.0",): 2.0,
        }  # fmt: skip
