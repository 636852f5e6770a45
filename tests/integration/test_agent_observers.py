"""Several plugins listen to one event: what one of them does or raises is its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookd import Plugin, TrainingError, hookimpl
from tests.support.agent import running


class Strict(Plugin):
    """Tells the training from hooks that change nothing."""

    name = "strict"
    mutates = True
    mutating = ("step_pre",)
    at = ""

    @hookimpl
    def loss(self):
        self.reported("loss")

    @hookimpl
    def loss_done(self):
        self.reported("loss_done")

    @hookimpl
    def step_post(self):
        self.reported("step_post")

    def reported(self, hook):
        if hook == self.at:
            raise TrainingError("planted")


class Switching(Plugin):
    """Leaves the gradients switched on."""

    name = "switching"

    def __init__(self) -> None:
        self.seen = []

    @hookimpl
    def loss(self):
        self.seen.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)

    @hookimpl
    def loss_done(self):
        pass

    @hookimpl
    def step_post(self):
        pass


class Another(Switching):
    name = "another"


def step():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("order", [(Strict, Switching), (Switching, Strict)])
@pytest.mark.parametrize("hook", ["loss", "loss_done", "step_post"])
def test_what_a_plugin_tells_the_training_goes_there_whoever_else_listens(monkeypatch, hook, order) -> None:
    with running(*order) as agent:
        step()
        monkeypatch.setattr(Strict, "at", hook)
        for _ in range(3):
            with pytest.raises(TrainingError, match="planted"):
                step()
        assert [agent.parts.registry.named(one.name).errors for one in order] == [0, 0]


def test_an_observer_that_switches_gradients_on_does_so_for_itself_alone() -> None:
    with running(Switching, Another) as agent, torch.set_grad_enabled(True):
        step()
        assert agent.plugin("switching").seen == agent.plugin("another").seen == [False]
        with torch.no_grad():
            agent.parts.dispatch.emit("loss", {})
            assert not torch.is_grad_enabled()


def test_of_several_tensors_the_first_is_summed_up_and_its_help_says_so() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.argmax(-1), x * 2, x * 3

    with running("activations", options={"every": "1"}) as agent:
        Several()(torch.ones(2, 4))
        assert agent.values("hookd_activations_mean") == {("#Several.(root)",): 2.0}
        (family,) = [one for one in agent.read().families if one.name == "hookd_activations_mean"]
        assert "first floating-point tensor" in family.help
