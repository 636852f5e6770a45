"""Each finding of hookd_activations is made in a training that has it, and not in the same training without it."""

from __future__ import annotations

import pytest
import torch
from hookd_activations.findings import INCIDENTS, Losses
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def train(model, steps=6, lr=0.01, loss=lambda out, step: out.float().square().mean(), width=8):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model(torch.randn(32, width)), step).backward()
        optimizer.step()


def found(hook):
    return {(incident.kind, incident.module) for incident in hook.incidents}


def perceptron(act):
    return nn.Sequential(nn.Linear(8, 64), act, nn.Linear(64, 1))


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_dead_relu(hook, is_dead):
    model = perceptron(nn.ReLU())
    if is_dead:
        nn.init.constant_(model[0].bias, -100.0)
    hook.start("activations", every=1)
    train(model)
    assert found(hook) == ({("dead", "1")} if is_dead else set())
    if is_dead:
        assert hook.value("activations_finding", "1", "dead") == 1
        assert "1 (ReLU) is dead: 100.0% of its units have only ever output 0" in hook.incident.message
        nn.init.constant_(model[0].bias, 0.0)
        train(model, steps=1)
        assert hook.value("activations_finding", "1", "dead") == 0
        assert len(hook.incidents) == 1


def test_a_dead_relu_that_comes_back_to_life_where_another_plugin_came_meanwhile_is_dead_no_more(hook):
    model = perceptron(nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    hook.start("activations", "timing", every=1)
    train(model)
    assert hook.value("activations_finding", "1", "dead") == 1
    hook.renew("timing")
    nn.init.constant_(model[0].bias, 0.0)
    train(model, steps=1)
    assert hook.value("activations_finding", "1", "dead") == 0


def test_patience_is_in_samples(hook):
    model = perceptron(nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    hook.start("activations", every=1, patience=5)
    train(model, steps=4)
    assert found(hook) == set()
    train(model, steps=1)
    assert found(hook) == {("dead", "1")}


@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.SiLU()], ids=lambda act: type(act).__name__)
@pytest.mark.parametrize("is_saturated", [True, False])
def test_a_saturated_function(hook, act, is_saturated):
    model = perceptron(act)
    if is_saturated and isinstance(act, (nn.Sigmoid, nn.Tanh)):
        model[0].weight.data.mul_(1000.0)
    elif is_saturated:
        nn.init.constant_(model[0].bias, -50.0)
    hook.start("activations", every=1)
    train(model)
    assert (("saturated", "1") in found(hook)) == is_saturated
    assert (hook.value("activations_saturation_ratio", "1") > 0.9) == is_saturated


def test_of_a_chain_of_saturated_layers_one_is_reported(hook):
    layers = [one for _ in range(4) for one in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))
    for linear in model[1:-1:2]:
        linear.weight.data.mul_(1000.0)
    hook.start("activations", every=1)
    train(model)
    assert [kind for kind, _ in found(hook)].count("saturated") == 1
    assert sum(key[1] == "saturated" and value == 1 for key, value in hook.metric("activations_finding").items()) == 4


def test_the_saturation_ratio_counts_where_the_slope_is_almost_0(hook):
    model = nn.Tanh()
    hook.start("activations", every=1)
    x = 2 * torch.randn(5000, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    want = float((slope <= 1 - 0.98**2).float().mean())
    assert hook.value("activations_saturation_ratio", "#Tanh.(root)") == pytest.approx(want, abs=1e-3)


def test_a_gradient_that_vanishes_with_depth(hook):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(14)], nn.Linear(16, 1))
    hook.start("activations", every=1)
    train(model, width=16)
    vanishing = {module for kind, module in found(hook) if kind == "vanishing"}
    assert "0.0" in vanishing
    assert "14" not in vanishing
    incident = next(one for one in hook.incidents if one.module == "0.0")
    assert incident.fields["depth"] == 0
    assert incident.fields["modules"] == 15


def test_a_gradient_that_fades_is_found_before_it_is_tiny(hook):
    class Gate(nn.Module):
        factor = 1.0

        def forward(self, x):
            return x + (x - x.detach()) * (self.factor - 1)  # the value passes, the gradient is scaled

    gate = Gate()
    model = nn.Sequential(nn.Linear(8, 8), gate, nn.Linear(8, 1))
    hook.start("activations", every=1)
    train(model, steps=8)
    assert found(hook) == set()
    gate.factor = 1e-6
    train(model)
    assert ("vanishing", "0") in found(hook)


def test_a_shallow_net_has_no_vanishing_gradient(hook):
    hook.start("activations", every=1)
    train(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), steps=12)
    assert found(hook) == set()


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_exploding_gradients(hook, factor):
    hook.start("activations", every=1)
    model = perceptron(nn.ReLU())
    train(model, steps=15, lr=0.0, loss=lambda out, step: out.square().mean() * (factor if step >= 12 else 1.0))
    assert found(hook) == ({("exploding", "")} if factor > 1 else set())
    if factor > 1:
        assert hook.incident.fields["worst"] in {"0", "2"}


@pytest.mark.parametrize(("rate", "steps"), [(1.38, 20), (1.38, 8), (1.0, 60)])
def test_a_loss_that_grows_exponentially_diverges(hook, rate, steps):
    model = nn.Linear(8, 1)
    hook.start("activations", every=10)
    noise = torch.rand(200, generator=torch.Generator().manual_seed(0))
    train(model, steps=60 + steps, lr=0.0, loss=lambda out, step: (
        out.sum() * 0 + (1 + noise[step]) * rate ** max(0, step - 60)
    ))  # fmt: skip
    kinds = {kind for kind, _ in found(hook)}
    assert ("diverging" in kinds) == (rate**steps > 100)


def test_the_loss_of_a_new_model_is_not_compared_with_that_of_the_former(hook):
    """A cross-validation trains one model after the other."""
    hook.start("activations", every=10)
    for _ in range(3):
        model = nn.Linear(8, 1)
        train(model, steps=40, lr=0.0, loss=lambda out, step: out.sum() * 0 + 10 * 0.8**step)
    assert found(hook) == set()


class Detached(nn.Module):
    def __init__(self, is_detached):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.is_detached = is_detached

    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden.detach() if self.is_detached else hidden)


@pytest.mark.parametrize("is_detached", [True, False])
def test_a_layer_that_gets_no_gradient(hook, is_detached):
    hook.start("activations", every=1, unchanged=8)
    train(Detached(is_detached), steps=10)
    assert found(hook) == ({("unchanged", "a")} if is_detached else set())


class Mixed(nn.Module):
    """Its first layer has bfloat16 weights: of 256 a small update is less than half of the last place."""

    def __init__(self, weight):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False).bfloat16(), nn.Linear(8, 1)
        nn.init.constant_(self.a.weight, weight)

    def forward(self, x):
        return self.b(self.a(x.bfloat16()).float())


@pytest.mark.parametrize(("weight", "lr", "is_lost"), [(256.0, 1e-7, True), (1e-4, 1e-2, False)])
def test_a_layer_whose_updates_are_lost_to_rounding(hook, weight, lr, is_lost):
    hook.start("activations", every=1, unchanged=8)
    train(Mixed(weight), steps=10, lr=lr)
    assert (("unchanged", "a") in found(hook)) == is_lost


@pytest.mark.parametrize("is_set_back", [True, False])
def test_a_layer_that_is_set_back_after_each_step(hook, is_set_back):
    hook.start("activations", every=1, unchanged=20)
    model = perceptron(nn.Tanh())
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    for _ in range(6):
        train(model, steps=1)
        model[0].load_state_dict(before if is_set_back else model[0].state_dict())
    assert found(hook) == ({("unchanged", "0")} if is_set_back else set())


def test_a_layer_that_is_frozen_on_purpose_is_no_finding(hook):
    hook.start("activations", every=1, unchanged=4)
    model = perceptron(nn.Tanh())
    model[0].requires_grad_(False)
    train(model, steps=8)
    assert found(hook) == set()


@pytest.mark.parametrize(("is_eval", "is_frozen"), [(True, False), (False, False), (True, True)])
def test_a_batch_norm_in_eval_mode_by_mistake(hook, is_eval, is_frozen):
    model = perceptron(nn.BatchNorm1d(64))
    model[1].train(not is_eval).requires_grad_(not is_frozen)
    hook.start("activations", every=1)
    train(model)
    assert found(hook) == ({("batchnorm_eval", "1")} if is_eval and not is_frozen else set())


def test_a_validation_in_eval_mode_is_no_finding(hook):
    model = perceptron(nn.BatchNorm1d(64)).eval()
    hook.start("activations", every=1)
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(32, 8))
    assert found(hook) == set()


@pytest.mark.parametrize(("rate", "said"), [(1.0, "rose from 0.001 to 1"), (0.001, "Look at the data")])
def test_a_spike_after_a_rise_of_the_learning_rate_is_laid_to_it(hook, rate, said):
    model, other = nn.Linear(4, 1, bias=False), nn.Linear(4, 1)
    one, two = torch.optim.SGD(model.parameters(), lr=0.001), torch.optim.SGD(other.parameters(), lr=0.5)
    hook.start("activations", every=1)
    x = torch.randn(16, 4)
    for step in range(60):
        if step == 55:
            one.param_groups[0]["lr"] = rate
        factor = 1000.0 if step == 56 else 1.0
        for net, optimizer in ((other, two), (model, one)):
            optimizer.zero_grad()
            (factor * (net(x) - 1).square().mean()).backward()
            optimizer.step()
    (message,) = {incident.message for incident in hook.incidents if incident.kind == "loss_spike"}
    assert said in message


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_a_loss_spike_is_seen_in_every_step(hook, factor):
    hook.start("activations", every=100, gradients="false")
    model = perceptron(nn.Tanh())
    train(model, steps=40, lr=0.0, loss=lambda out, step: out.square().mean() * (factor if step == 33 else 1.0))
    assert found(hook) == ({("loss_spike", "")} if factor > 1 else set())
    if factor > 1:
        assert hook.incident.step == 34


@given(st.lists(st.floats(1.0, 1.4), min_size=1, max_size=200))
def test_noise_of_less_than_half_the_loss_is_no_spike(values):
    losses = Losses(3.0)
    assert not any(losses.is_spike(0, value) for value in values)


@given(st.lists(st.floats(-10, 10), min_size=Losses.LEAST, max_size=100), st.integers(0, 7))
def test_what_leaves_the_range_by_far_is_a_spike_in_its_own_place_only(values, place):
    losses = Losses(3.0)
    for value in values:
        losses.is_spike(place, value)
    assert not losses.is_spike(place + 1, 1e6)
    assert losses.is_spike(place, 1e6)
    assert not losses.is_spike(place, float("nan"))


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return torch.full((64,), self.value, dtype=torch.float16)


@pytest.mark.parametrize(("value", "is_near"), [(40000.0, True), (-40000.0, True), (100.0, False), (-65504.0, False)])
def test_a_float16_output_that_is_about_to_overflow(hook, value, is_near):
    hook.start("activations", every=1)
    model = Constant(value)
    for _ in range(3):
        model(None)
    assert found(hook) == ({("near_overflow", "#Constant.(root)")} if is_near else set())


def test_a_few_elements_are_saturated_by_chance(hook):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    model[0].weight.data.mul_(1000.0)
    hook.start("activations", every=1)
    for _ in range(8):
        model(torch.ones(8, 4))
    assert hook.value("activations_saturation_ratio", "1") == 1
    assert hook.incidents == []


def test_a_loss_near_0_that_jumps_at_a_hard_sample_is_no_spike():
    losses = Losses(3.0)
    quiet = [0.0002 * (1 + k % 10) ** 2 for k in range(64)]
    assert not any(losses.is_spike(0, value) for value in [*quiet, 0.14, *quiet])
    narrow = Losses(3.0)
    assert [narrow.is_spike(0, value) for value in [*(2.5 + 0.01 * (k % 10) for k in range(64)), 4.0]][-1]


def test_of_one_kind_so_many_findings_are_reported_and_the_gauge_shows_all(hook):
    model = nn.Sequential(
        *(layer for _ in range(INCIDENTS + 2) for layer in (nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)))
    )
    for layer in model[::3]:
        nn.init.constant_(layer.bias, -100.0)
    hook.start("activations", every=1, vanishing=1e-30)
    train(model, steps=4)
    dead = [incident.module for incident in hook.incidents if incident.kind == "dead"]
    assert (len(dead), len(set(dead))) == (INCIDENTS, INCIDENTS)
    assert sum(kind == "dead" for _, kind in hook.metric("activations_finding")) == INCIDENTS + 2


def test_a_finding_that_is_over_explains_nothing_though_the_module_has_another(hook):
    hook.start("activations")
    findings = hook.plugin("activations").findings
    for kind, holds in (("dead", True), ("dead", False), ("vanishing", True)):
        findings.see(kind, "a", "{module}", holds=holds, patience=1)
    assert [findings.holds(kind) for kind in ("dead", "vanishing")] == [False, True]
