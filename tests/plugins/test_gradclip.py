"""hookd_gradclip changes gradients exactly as torch's own functions in the script would, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from hookd_gradclip import rules
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.clipped import OPTIMIZERS, both, decay_groups, net, train


class TestNorm:
    @pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_weights_are_those_of_the_script(self, hook, norm_type, optimizer):
        plugin, script, plain = both(
            hook,
            lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type),
            optimizer=optimizer,
            options={"max_norm": 0.5, "norm_type": norm_type},
        )
        assert torch.equal(plugin, script)
        assert not torch.equal(plugin, plain)

    def test_weights_are_those_of_the_script_with_accumulation(self, hook):
        plugin, script, _ = both(
            hook, lambda m: clip_grad_norm_(m.parameters(), 0.5), accumulate=3, options={"max_norm": 0.5}
        )
        assert torch.equal(plugin, script)

    @pytest.mark.parametrize("foreach", [True, False])
    @pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
    def test_weights_are_those_of_the_script_with_foreach_and_without(self, hook, norm_type, foreach):
        plugin, script, plain = both(
            hook,
            lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type, foreach=foreach),
            options={"max_norm": 0.5, "norm_type": norm_type},
        )
        assert torch.equal(plugin, script)
        assert not torch.equal(plugin, plain)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_weights_are_those_of_the_script_in(self, hook, dtype):
        plugin, script, _ = both(
            hook, lambda m: clip_grad_norm_(m.parameters(), 0.5), dtype=dtype, options={"max_norm": 0.5}
        )
        assert torch.equal(plugin, script)

    def test_weights_are_those_of_the_script_under_a_scaler(self, hook):
        plugin, script, _ = both(
            hook,
            lambda m: clip_grad_norm_(m.parameters(), 0.5),
            scaler=lambda: torch.amp.GradScaler("cpu"),
            options={"max_norm": 0.5},
        )
        assert torch.equal(plugin, script)

    def test_fused_optimizer_that_unscales_by_itself(self, hook):
        """The script must unscale first; the plugin clips gradients that are scaled by a power of two: the same bits."""
        plugin, script, plain = both(
            hook,
            lambda m: clip_grad_norm_(m.parameters(), 0.5),
            optimizer="fused",
            scaler=lambda: torch.amp.GradScaler("cpu"),
            options={"max_norm": 0.5},
        )
        assert torch.allclose(plugin, script, rtol=1e-6, atol=1e-8)
        assert not torch.allclose(plugin, plain, rtol=1e-3)

    def test_order_of_the_optimizer_on_demand(self, hook):
        def clip(model):
            clip_grad_norm_([p for group in decay_groups(model) for p in group["params"]], 0.5)

        plugin, script, _ = both(hook, clip, optimizer="groups", options={"max_norm": 0.5, "order": "optimizer"})
        assert torch.equal(plugin, script)

    def test_two_optimizers_are_clipped_one_by_one(self, hook):
        def run(clip):
            models = [net(), net()]
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
            for _ in range(5):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    (model(torch.ones(2, 6)) * 10).square().sum().backward()
                    if clip:
                        clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
            return torch.cat([p.detach().view(-1) for m in models for p in m.parameters()])

        script = run(clip=True)
        hook.start("gradclip", max_norm=0.5)
        assert torch.equal(run(clip=False), script)

    def test_metrics_of_a_known_gradient(self, hook):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        hook.start("gradclip", max_norm=1.0)
        for gradient, norm, scale in (([3.0, 4.0], 5.0, 1 / (5 + 1e-6)), ([0.3, 0.4], 0.5, 1.0)):
            weight.grad = torch.tensor(gradient)
            optimizer.step()
            assert hook.value("gradclip_norm") == pytest.approx(norm)
            assert hook.value("gradclip_scale") == pytest.approx(scale, rel=1e-7)
        assert hook.value("gradclip_clipped", "norm") == 1
        assert weight.tolist() == pytest.approx([-0.6 - 0.3, -0.8 - 0.4], rel=1e-5)

    @pytest.mark.parametrize("mode", [{"max_norm": 1.0}, {"mode": "value", "clip_value": 1.0}])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_gradients_that_are_not_finite_are_left_as_they_are(self, hook, mode, bad):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        hook.start("gradclip", **mode)
        weight.grad = torch.tensor([5.0, bad, 0.0])
        optimizer.step()
        torch.testing.assert_close(weight.grad, torch.tensor([5.0, bad, 0.0]), equal_nan=True, rtol=0, atol=0)
        assert hook.value("gradclip_nonfinite") == 1
        assert hook.value("gradclip_clipped", mode.get("mode", "norm")) == 0

    def test_parameters_without_gradients_do_not_matter(self, hook):
        model = net()
        model[1].requires_grad_(requires_grad=False)
        hook.start("gradclip", max_norm=0.5)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        assert hook.value("gradclip_norm") > 0


class TestValue:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weights_are_those_of_the_script(self, hook, optimizer, dtype):
        plugin, script, plain = both(
            hook,
            lambda m: clip_grad_value_(m.parameters(), 0.05),
            optimizer=optimizer,
            dtype=dtype,
            options={"mode": "value", "clip_value": 0.05},
        )
        assert torch.equal(plugin, script)
        assert not torch.equal(plugin, plain)

    def test_weights_are_those_of_the_script_under_a_scaler(self, hook):
        plugin, script, _ = both(
            hook,
            lambda m: clip_grad_value_(m.parameters(), 0.05),
            scaler=lambda: torch.amp.GradScaler("cpu"),
            options={"mode": "value", "clip_value": 0.05},
        )
        assert torch.equal(plugin, script)

    def test_fused_optimizer_that_unscales_by_itself(self, hook):
        plugin, script, plain = both(
            hook,
            lambda m: clip_grad_value_(m.parameters(), 0.05),
            optimizer="fused",
            scaler=lambda: torch.amp.GradScaler("cpu"),
            options={"mode": "value", "clip_value": 0.05},
        )
        assert torch.allclose(plugin, script, rtol=1e-6, atol=1e-8)
        assert not torch.allclose(plugin, plain, rtol=1e-3)

    def test_largest_magnitude_is_the_norm(self, hook):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        hook.start("gradclip", mode="value", clip_value=1.0)
        weight.grad = torch.tensor([-7.0, 0.5])
        optimizer.step()
        assert hook.value("gradclip_norm") == 7.0
        assert hook.value("gradclip_clipped", "value") == 1
        assert weight.tolist() == [1.0, -0.5]


class TestParameter:
    @pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_weights_are_those_of_the_script(self, hook, norm_type, optimizer):
        def clip(model):
            for parameter in model.parameters():
                clip_grad_norm_([parameter], 0.1, norm_type)

        options = {"mode": "param", "max_norm": 0.1, "norm_type": norm_type}
        plugin, script, plain = both(hook, clip, optimizer=optimizer, options=options)
        assert torch.equal(plugin, script)
        assert not torch.equal(plugin, plain)

    def test_largest_norm_is_shown(self, hook):
        small, large = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([small, large], lr=1.0)
        hook.start("gradclip", mode="param", max_norm=1.0)
        small.grad, large.grad = torch.tensor([0.5]), torch.tensor([3.0, 4.0])
        optimizer.step()
        assert hook.value("gradclip_norm") == pytest.approx(5.0)
        assert hook.value("gradclip_clipped", "param") == 1
        assert small.tolist() == [-0.5]
        assert large.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


class TestDryRun:
    @pytest.mark.parametrize("options", [{}, {"dry_run": True, "mode": "value"}, {"dry_run": True, "mode": "module"},
                                         {"dry_run": True, "max_norm": 0.01}])  # fmt: skip
    def test_measures_and_changes_nothing(self, hook, options):
        want = train(model := net(), _sgd(model))
        hook.start("gradclip", **options)
        got = train(model := net(), _sgd(model))
        assert torch.equal(got, want)
        assert hook.value("gradclip_norm") > 0

    def test_settings_arm_it(self, hook):
        hook.start("gradclip", max_norm=0.5)
        model = net()
        train(model, _sgd(model), steps=1)
        assert model[0].weight.grad.norm() <= 0.5


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


class TestOnADevice:
    def test_norms_are_read_at_the_next_step(self, hook, monkeypatch):
        monkeypatch.setattr(rules, "on_host", lambda _tensor: False)
        plugin, script, _ = both(hook, lambda m: clip_grad_norm_(m.parameters(), 0.5), options={"max_norm": 0.5})
        assert torch.equal(plugin, script)
        assert hook.value("gradclip_clipped", "norm") > 0

    def test_values_are_clipped_without_reading_them(self, hook, monkeypatch):
        monkeypatch.setattr(rules, "on_host", lambda _tensor: False)
        plugin, script, _ = both(
            hook, lambda m: clip_grad_value_(m.parameters(), 0.05), options={"mode": "value", "clip_value": 0.05}
        )
        assert torch.equal(plugin, script)
