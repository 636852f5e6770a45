"""Trainings that look odd and are well: hookd_activations tells of nothing there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookd import PluginError


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def kinds(hook):
    return [(one.kind, one.module) for one in hook.incidents]


class InTurn(nn.Module):
    """A trunk, and experts; each call uses one of them."""

    def __init__(self, experts):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(experts))

    def forward(self, x, which):
        return self.experts[which](self.trunk(x))


@pytest.mark.parametrize("experts", [2, 7])
def test_what_is_trained_between_the_sampled_steps_alone_changes(hook, experts):
    hook.start("activations", every=4, unchanged=5)
    model = InTurn(experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(60):
        which = 0 if at % 4 == 0 else at % experts
        step(optimizer, model(torch.randn(8, 8), which).square().mean())
    assert kinds(hook) == []


def test_what_no_step_trains_does_not_change(hook):
    hook.start("activations", every=4, unchanged=5)
    model = InTurn(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(60):
        output = model(torch.randn(8, 8), at % 2) + 0 * model(torch.randn(8, 8), 2).detach()
        step(optimizer, output.square().mean())
    assert kinds(hook) == [("unchanged", "experts.2")]


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def images():
    return torch.randn(4, 3, 6, 6)


@pytest.mark.parametrize("by_grad", [True, False])
def test_an_attack_in_eval_mode_before_each_step_is_no_batch_norm_in_eval_mode(hook, by_grad):
    hook.start("activations", every=1)
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        model.eval()
        x = images()
        for _ in range(4):
            x = x.detach().requires_grad_()
            loss = model(x).square().mean()
            if by_grad:
                (gradient,) = torch.autograd.grad(loss, x)
            else:
                loss.backward()
                gradient = x.grad
            x = x + 0.01 * gradient.sign()
        model.train()
        step(optimizer, model(x.detach()).square().mean())
    assert kinds(hook) == []


def test_a_validation_that_forgets_no_grad_is_no_batch_norm_in_eval_mode(hook):
    hook.start("activations", every=1)
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at in range(20):
        step(optimizer, model.train()(images()).square().mean())
        if at % 4 == 3:
            for _ in range(6):
                model.eval()(images())
    assert kinds(hook) == []


def test_a_frozen_critic_in_eval_mode_is_no_batch_norm_that_is_trained(hook):
    """Its parameters have requires_grad; no optimizer has them."""
    hook.start("activations", every=1)
    critic, maker = conv_net().eval(), nn.Conv2d(3, 3, 1)
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.01)
    for _ in range(8):
        step(optimizer, critic(maker(images())).square().mean())
    assert kinds(hook) == []


class Head(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.body, self.sure, self.end = nn.Linear(8, 64), nn.Sigmoid(), end

    def forward(self, x):
        return self.end(self.sure(1000 * self.body(x)))


ENDS = {
    "itself": lambda out: out, "view": lambda out: out[:, :32], "shape": lambda out: out.view(-1, 1)[:, 0],
    "scaled": lambda out: 2 * out.float() - 1, "dict": lambda out: {"y": out},
}  # fmt: skip


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_a_sure_classifier_is_not_saturated(hook, end, learns):
    hook.start("activations", every=1, patience=1)
    model = Head(ENDS[end])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(5):
        with torch.set_grad_enabled(learns):
            output = model(torch.randn(32, 8))
        if learns:
            step(optimizer, sum(o.sum() for o in (output.values() if end == "dict" else [output])))
    assert (kinds(hook) == []) == (learns or end != "scaled"), "without a graph only what shares memory is known"


def test_what_other_modules_use_is_saturated_though_it_is_near_the_end(hook):
    hook.start("activations", every=1)
    model = Head(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(5):
        step(optimizer, model(torch.randn(32, 8)).sum())
    assert kinds(hook) == [("saturated", "sure")]


def test_where_the_root_is_not_chosen_the_end_is_known_all_the_same(hook):
    hook.start("activations", every=1, modules="sure")
    model = Head(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(5):
        step(optimizer, model(torch.randn(32, 8)).sum())
    assert kinds(hook) == []
    assert list(hook.metric("activations_mean")) == [("sure",)]


@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_code_of_which_one_percent_is_on_is_not_dead(hook, batch, is_sparse):
    """Every unit fires for one sample in 200; or the one half of them for one in 50, and the other never."""
    hook.start("activations", every=1, patience=2, dead=0.3)
    relu = nn.ReLU()
    units = 512
    for _ in range(800 // batch):
        x = torch.rand(batch, units) - (0.995 if is_sparse else 0.99)
        if not is_sparse:
            x[:, : units // 2] = -1.0
        relu(x)
    assert kinds(hook) == ([] if is_sparse else [("dead", "#ReLU.(root)")])


def test_the_channels_of_images_are_units(hook):
    hook.start("activations", every=1, patience=2, dead=0.7)
    relu = nn.ReLU()
    x = -torch.ones(64, 8, 4, 4)
    x[:, 0] = 1.0  # one of eight channels is on
    for _ in range(8):
        relu(x)
    assert kinds(hook) == [("dead", "#ReLU.(root)")]


@pytest.mark.parametrize("options", [{"dead": 2}, {"dead": 0}, {"saturated": 1.01}, {"dead": "nan"}])
def test_shares_above_1_are_refused(hook, options):
    with pytest.raises(PluginError, match="must be above 0 and at most 1, not"):
        hook.start("activations", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules": "body|bdy"}, "modules=bdy matches no module; there is body"),
        ({"types": "Sigmiod"}, "types=Sigmiod matches no class of a module; there is Sigmoid"),
        ({"modules": "body", "types": "Sigmoid"}, "together select no module"),
        ({"modules": "b*", "types": "Lin*|Head"}, None),
    ],
)
def test_options_that_choose_nothing_are_reported_once(hook, options, words):
    hook.start("activations", **options)
    model = Head(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(45):
        step(optimizer, model(torch.randn(4, 8)).sum())
    messages = [one.message for one in hook.incidents if one.kind == "option"]
    assert [words in text for text in messages] == ([True] if words else [])


def test_of_models_that_take_turns_under_one_name_each_is_judged_by_itself(hook):
    hook.start("activations", every=1)
    for _ in range(6):
        model = conv_net().eval()  # as a search over models does, each for one step
        step(torch.optim.SGD(model.parameters(), lr=0.01), model(images()).square().mean())
    assert kinds(hook) == []


def test_a_training_that_has_converged_makes_noise_and_no_findings(hook):
    """Without noise in the data, the loss falls to the last bits of its numbers."""
    hook.start("activations", every=1)
    torch.manual_seed(0)
    model, weights = nn.Linear(8, 1), torch.randn(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(600):
        x = torch.randn(64, 8)
        step(optimizer, nn.functional.mse_loss(model(x), x @ weights))
    assert kinds(hook) == []
