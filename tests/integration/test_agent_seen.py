"""The states of modules, from seen to unseen, in the metric hookd_modules."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import nn

from hookd import Plugin, hookimpl
from tests.support.agent import Running, running

X = torch.ones(3, 4)


class Looks(Plugin):
    """Listens everywhere, and asks for the states."""

    name = "looks"

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, module):
        pass


class Past(nn.Module):
    """Three layers: the first is called, the other two as the test says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.go(self.a(x))


def train(agent: Running, model: nn.Module, steps: int = 3) -> dict[str, str]:
    """Take some steps; return the state of each module, by its name. The metric must count the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
    found = {module.name: state for module, state in agent.plugin("looks").context.module_states()}
    assert counted(agent) == Counter(state for state in found.values() if state)
    return found


def counted(agent: Running) -> dict[str, float]:
    return {state: count for (state,), count in agent.values("hookd_modules").items() if count}


def past(go) -> Past:
    model = Past()
    model.go = lambda x: go(model, x)
    return model


def test_modules_that_are_called_are_observed():
    with running(Looks) as agent:
        assert set(train(agent, past(lambda m, x: m.c(m.b(x)))).values()) == {"observed"}


def test_a_module_that_is_never_called_is_reported():
    with running(Looks) as agent:
        found = train(agent, past(lambda m, x: m.b(x)))
        assert found == {"(root)": "observed", "a": "observed", "b": "observed", "c": "never_called"}


@pytest.mark.parametrize(
    "go",
    [
        lambda m, x: m.c(m.b.forward(x)),
        lambda m, x: m.c(F.linear(x, m.b.weight, m.b.bias)),
        lambda m, x: m.c(x @ m.b.weight),
    ],
    ids=["forward", "functional", "weight"],
)
def test_a_module_that_gets_gradients_without_a_call_is_bypassed(go):
    with running(Looks) as agent:
        found = train(agent, past(go))
        assert found == {"(root)": "observed", "a": "observed", "b": "bypassed", "c": "observed"}


def test_the_projection_inside_torchs_attention_is_bypassed_by_torch_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    with running(Looks) as agent:
        assert train(agent, Net())["attention.out_proj"] == "bypassed"


def test_a_weight_that_is_shared_with_a_module_that_is_called_proves_nothing():
    model = past(lambda m, x: m.b(x))
    model.c.weight, model.c.bias = model.b.weight, model.b.bias
    with running(Looks) as agent:
        assert train(agent, model)["c"] == "never_called"


def test_a_module_that_is_called_later_becomes_observed():
    model = past(lambda m, x: m.c.forward(m.b(x)))
    with running(Looks) as agent:
        assert train(agent, model)["c"] == "bypassed"
        model.go = lambda x: model.c(model.b(x))
        assert train(agent, model)["c"] == "observed"
        assert not model.c.weight._post_accumulate_grad_hooks, "it is watched no longer"


def test_lists_of_modules_have_nothing_to_be_seen():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[0](x)

    with running(Looks) as agent:
        assert train(agent, Net()) == {"(root)": "observed", "layers": "", "layers.0": "observed"}


def test_scripted_modules_are_reported(recwarn):
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with running(Looks) as agent:
        assert train(agent, model)["1"] == "scripted"


def test_nothing_is_reported_before_a_step_was_made():
    with running(Looks) as agent:
        model = past(lambda m, x: m.b(x))
        model(X)
        assert counted(agent) == {"observed": 4}


def test_a_detach_takes_all_hooks_back():
    model = past(lambda m, x: m.b(x))
    with running(Looks) as agent:
        train(agent, model)
        assert model.c.weight._post_accumulate_grad_hooks
    assert not model.c.weight._post_accumulate_grad_hooks


@pytest.mark.xfail(
    strict=True, reason="a module without parameters leaves no trace when its forward is called directly"
)
def test_a_module_without_parameters_that_is_bypassed_is_reported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.relu.forward(self.layer(x))

    with running(Looks) as agent:
        found = train(agent, Net())
        assert found["layer"] == "observed"
        assert found["relu"] == "bypassed"
