"""Bad gradients with several optimizers under one GradScaler, with closures, and with skipped steps."""

from __future__ import annotations

import math

import hookd_nan.forward
import hookd_nan.scan
import pytest
import torch
from torch import nn

NAN, INF = math.nan, math.inf


@pytest.fixture(params=["host", "device"])
def _place(request, monkeypatch):
    if request.param == "device":
        monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
        monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)


class TwoModels:
    """Two models with an optimizer each; the gradients of the first one overflow in the given steps."""

    def __init__(self, *, fused=False, bad=lambda _step: True):
        self.models = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), nn.Linear(4, 1)
        self.optimizers = [torch.optim.SGD(model.parameters(), 1e-3, fused=fused) for model in self.models]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
        self.bad = bad

    def backward(self, at, step):
        out = self.models[at](torch.randn(3, 4))
        if at == 0 and self.bad(step):
            out.register_hook(lambda gradient: gradient * INF)
        self.scaler.scale(out.square().mean() * 1e-30).backward()

    def together(self, steps):
        """Run both backwards, then both optimizers."""
        for step in range(steps):
            self.backward(0, step)
            self.backward(1, step)
            self.step(0), self.step(1)
            self.scaler.update()
            for optimizer in self.optimizers:
                optimizer.zero_grad()

    def in_turns(self, steps):
        """Take turns, as in a GAN; each model's gradients are cleared before its own backward."""
        for step in range(steps):
            for at in (0, 1):
                self.optimizers[at].zero_grad()
                self.backward(at, step)
                self.step(at)
            self.scaler.update()

    def step(self, at):
        self.scaler.step(self.optimizers[at])


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["together", "in_turns"])
class TestSeveralOptimizers:
    def test_healthy_one_does_not_hide_that_the_other_is_skipped(self, hook, fused, how):
        both = TwoModels(fused=fused)
        hook.start("nan", amp_patience=5)
        getattr(both, how)(10)
        assert (hook.incident.module, hook.incident.fields["where"]) == ("2", "grad")
        assert hook.value("nan_amp_skipped_steps") == 10 if fused else 9  # the last is not known to be skipped yet

    def test_good_step_of_its_own_ends_the_row(self, hook, fused, how):
        both = TwoModels(fused=fused, bad=lambda step: step % 4 != 3)
        hook.start("nan", amp_patience=5)
        getattr(both, how)(16)
        assert hook.incidents == []
        assert hook.value("nan_amp_skipped_steps") == 12


def test_sum_of_scaled_losses_is_a_scaled_loss(hook):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    hook.start("nan", every=4)
    for step in range(12):
        out = model(torch.randn(3, 4))
        if step in (3, 9):
            out.register_hook(lambda gradient: gradient * INF)
        (scaler.scale(out.square().mean()) + scaler.scale(out.abs().mean())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert hook.incidents == []
    assert hook.value("nan_amp_skipped_steps") == 2


def closures(model, optimizer, *, steps=8, bad=lambda step: step == 4, seen=None):
    """Train with closures, as Lightning does."""
    for step in range(steps):
        x = torch.full((3, 4), NAN) if bad(step) else torch.randn(3, 4)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step(closure)
        if seen is not None:
            seen.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))


class TestClosures:
    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
    @pytest.mark.parametrize("every", [1, 4])
    def test_skip_takes_the_gradients_that_the_closure_has_made(self, hook, kind, every):
        model, still = nn.Linear(4, 1), []
        hook.start("nan", policy="skip", every=every)
        closures(model, kind(model.parameters(), 0.1), bad=lambda step: step in (4, 6), seen=still)
        assert still == [False, False, False, False, True, False, True, False]
        assert hook.value("nan_policy", "skip") == 2

    def test_optimizer_finds_on_its_closure_what_the_training_has_put_there(self, hook):
        seen = []

        class Asks(torch.optim.SGD):
            def step(self, closure=None):
                seen.append((closure.__name__, closure.what))
                return super().step(closure)

        optimizer = Asks(nn.Linear(4, 1).parameters(), lr=0.1)

        def closure():
            return None

        closure.what = "of the training's"
        hook.start("nan")
        optimizer.step(closure)
        assert seen == [("closure", "of the training's")]

    def test_skip_is_refused_with_lbfgs(self, hook):
        model = nn.Linear(4, 1)
        hook.start("nan", policy="skip")
        closures(model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3))
        assert [one for one in hook.incidents if one.kind == "refused" and "LBFGS" in one.message]
        assert hook.value("nan_policy", "skip") == 0

    def test_origin_is_reported_in_the_step_whose_closure_has_it(self, hook):
        model = nn.Linear(4, 1)
        hook.start("nan", every=4)
        closures(model, torch.optim.Adam(model.parameters(), 0.1))
        assert (hook.incident.fields["where"], hook.incident.step) == ("input", 5)
        assert [one["step"] for one in hook.incident.fields["steps_before"]] == [1, 2, 3, 4]

    def test_bad_gradient_alone_is_found_in_the_closure_that_made_it(self, hook):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        hook.start("nan", every=4)
        closures(model, optimizer, steps=2, bad=lambda _step: False)
        model.bias.register_hook(lambda gradient: gradient * NAN)
        closures(model, optimizer, steps=1, bad=lambda _step: False)
        assert (hook.incident.fields["where"], hook.incident.fields["parameter"], hook.incident.step) == (
            "grad",
            "bias",
            3,
        )


def test_bad_gradients_that_recur_are_not_searched_for_their_parameter_again(hook, monkeypatch):
    """The search is expensive: at every step it would take most of a small model's step."""
    asked = []
    blame = hookd_nan.blame.Blame.gradient
    monkeypatch.setattr(hookd_nan.blame.Blame, "gradient", lambda *args: asked.append(1) or blame(*args))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("nan", policy="skip")
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(3, 4)).mean() * NAN).backward()
        optimizer.step()
    assert hook.value("nan_policy", "skip") == 20
    assert len(asked) <= 1


@pytest.mark.parametrize("again", [4, 6])
def test_after_a_hit_of_the_gate_the_gradients_of_all_modules_are_looked_at(hook, again):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_on = False

        def forward(self, x):
            return (x * 0).sqrt() + x if self.is_on else x

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Root(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("nan", every=4, policy="skip")
    for step in range(1, 8):
        model[2].is_on = step in (3, again)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).mean().backward()
        optimizer.step()
    _, first, second = hook.incidents
    assert (first.module, first.fields["parameter"], first.step, first.fields["is_exact"]) == ("1", "bias", 3, False)
    assert (second.module, second.fields["where"], second.step) == ("2", "grad", again)
    assert second.fields["is_exact"] is (again == 6)  # in step 3 it was there, and not looked at
