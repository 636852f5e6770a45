"""hookd_gradclip changes gradients exactly as torch's own functions in the script would, or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from hookd_gradclip import rules
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hookd import PluginError


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), Block(16), Block(16), nn.Linear(16, 1)).to(dtype)


def decay_groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.AdamW(decay_groups(m), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def train(model, optimizer, *, clip=None, steps=12, accumulate=1, scaler=None, dtype=torch.float32):
    """Train; gives all weights in one tensor. `clip` is what the script itself does before a step."""
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            out = model(torch.randn(8, 6, dtype=dtype))
            loss = functional.mse_loss(out.float(), torch.ones(8, 1)) * 10
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def both(hook, clip, *, optimizer="adamw", dtype=torch.float32, scaler=None, options=None, **how):
    """Train with the clipping in the script, and with the plugin's; gives both results and an unclipped one."""

    def run(clip):
        model = net(dtype)
        return train(model, OPTIMIZERS[optimizer](model), clip=clip, dtype=dtype, scaler=scaler and scaler(), **how)

    script, plain = run(clip), run(None)
    hook.start("gradclip", **(options or {}))
    return run(None), script, plain


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
        """The script must unscale first, the plugin clips what is scaled by a power of two: the same bits."""
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


def units_of(parameter):
    """Give the indices of a parameter's units, as the paper counts them: rows; of a vector all of it."""
    return list(range(len(parameter))) if parameter.squeeze().dim() > 1 else [...]


def agc(model, factor, eps=1e-3, leave=()):
    """arXiv:2102.06171, equation 3, element by element in Python's own floats: as slow and as plain as it can be."""
    for name, parameter in model.named_parameters():
        if name in leave:
            continue
        for unit in units_of(parameter):
            weights = parameter.detach()[unit].double().flatten().tolist()
            gradient = parameter.grad[unit]
            weight_norm = max(math.sqrt(math.fsum(w * w for w in weights)), eps)
            gradient_norm = math.sqrt(math.fsum(g * g for g in gradient.double().flatten().tolist()))
            if gradient_norm / weight_norm > factor:
                parameter.grad[unit] = gradient * (factor * weight_norm / gradient_norm)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gain = nn.Conv2d(1, 4, 2, bias=False), nn.Parameter(torch.ones(()))
        self.norm, self.fc = nn.GroupNorm(2, 4), nn.Linear(8, 1)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x.view(-1, 1, 2, 3))).flatten(1) * self.gain)


class TestAdaptive:
    @pytest.mark.parametrize("make", [net, ConvNet], ids=["linear", "conv"])
    @pytest.mark.parametrize("factor", [0.02, 0.3])
    def test_weights_are_those_of_the_papers_formula(self, hook, make, factor):
        def run(clip):
            torch.manual_seed(3)
            model = make()
            return train(model, torch.optim.SGD(model.parameters(), lr=0.05), clip=clip)

        plain, want = run(None), run(lambda model: agc(model, factor))
        hook.start("gradclip", mode="agc", clip_factor=factor)
        torch.testing.assert_close(run(None), want, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(plain, want, rtol=1e-2), "nothing is clipped: the test proves nothing"
        assert hook.value("gradclip_clipped", "agc") > 0

    def test_last_layer_can_be_left_out(self, hook):
        def run(clip):
            model = net()
            return train(model, torch.optim.SGD(model.parameters(), lr=0.05), clip=clip)

        want = run(lambda model: agc(model, 0.05, leave=("3.weight", "3.bias")))
        everywhere = run(lambda model: agc(model, 0.05))
        hook.start("gradclip", mode="agc", clip_factor=0.05, exclude="3.*")
        got = run(None)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(got, everywhere, rtol=1e-2)

    def test_small_weights_count_as_eps(self, hook):
        weight = nn.Parameter(torch.zeros(2, 2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        hook.start("gradclip", mode="agc", clip_factor=0.5, eps=0.1)
        weight.grad = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
        optimizer.step()
        torch.testing.assert_close(weight.grad, torch.tensor([[0.03, 0.04], [0.03, 0.04]]))
        assert hook.value("gradclip_norm") == pytest.approx(50.0)
        assert hook.value("gradclip_scale") == pytest.approx(0.01)

    def test_fused_optimizer_that_unscales_by_itself(self, hook):
        plugin, script, plain = both(
            hook,
            lambda m: agc(m, 0.02),
            optimizer="fused",
            scaler=lambda: torch.amp.GradScaler("cpu"),
            options={"mode": "agc", "clip_factor": 0.02},
        )
        torch.testing.assert_close(plugin, script, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(plugin, plain, rtol=1e-3)


class TestNonfinite:
    @pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"mode": "value", "clip_value": 1.0},
                                         {"mode": "param", "max_norm": 1.0}, {"mode": "agc", "clip_factor": 1.0}])  # fmt: skip
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_skip_takes_the_whole_step_out_of_the_optimizer(self, hook, options, bad):
        weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.Adam(weights, lr=0.1)
        hook.start("gradclip", nonfinite="skip", **options)

        def step(value):
            weights[0].grad, weights[1].grad = torch.tensor([value, 1.0]), torch.ones(2)
            optimizer.step()

        step(1.0)
        before = [w.tolist() for w in weights]
        step(bad)
        assert [w.tolist() for w in weights] == before, "Adam moves on zeros, too; without gradients it does not"
        assert [w.grad for w in weights] == [None, None]
        assert hook.value("gradclip_skipped") == hook.value("gradclip_nonfinite") == 1
        step(1.0)
        assert [w.tolist() for w in weights] != before

    @pytest.mark.parametrize("options", [{"mode": "param", "max_norm": 1.0}, {"mode": "agc", "clip_factor": 0.1}])
    def test_nothing_of_such_a_step_is_changed(self, hook, options):
        weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        hook.start("gradclip", **options)
        weights[0].grad, weights[1].grad = torch.tensor([math.inf, 1.0]), torch.full((2,), 9.0)
        optimizer.step()
        assert weights[0].grad.tolist() == [math.inf, 1.0]
        assert weights[1].grad.tolist() == [9.0, 9.0]
        assert hook.value("gradclip_nonfinite") == 1
        assert hook.value("gradclip_clipped", options["mode"]) == 0

    @pytest.mark.parametrize("fused", [False, True])
    def test_step_that_a_scaler_skips_is_skipped_as_without_us(self, hook, fused):
        def run():
            weight = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            seen = []
            for value in (1.0, math.inf, 1.0):
                optimizer.zero_grad()
                scaler.scale((weight * value).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                seen.append(weight.tolist())
            return seen

        want = run()
        hook.start("gradclip", max_norm=1e3, nonfinite="skip")
        assert run() == want


class TestClosure:
    @pytest.mark.parametrize("passes", [1, 3])
    def test_lbfgs_is_clipped_at_the_end_of_each_closure(self, hook, passes):
        def run(clip):
            model = net()
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
            calls = 0

            def closure():
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                for scale in range(1, passes + 1):  # gradients accumulate inside of the closure
                    value = (model(torch.ones(2, 6)) * scale).square().mean()
                    value.backward()
                if clip:
                    clip_grad_norm_(model.parameters(), 0.05)
                return value

            for _ in range(3):
                optimizer.step(closure)
            return torch.cat([p.detach().view(-1) for p in model.parameters()]), calls

        (script, calls), (plain, _) = run(clip=True), run(clip=False)
        hook.start("gradclip", max_norm=0.05)
        plugin, calls_under_us = run(clip=False)
        assert torch.equal(plugin, script)
        assert calls_under_us == calls
        assert not torch.equal(plugin, plain)
        assert 0 < hook.value("gradclip_clipped", "norm") <= calls

    def test_keyword_closure_and_its_value_are_passed_on(self, hook):
        weight = nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([weight], lr=1.0)

        def closure():
            optimizer.zero_grad()
            value = 10 * weight.sum()
            value.backward()
            return value

        hook.start("gradclip", max_norm=1.0)
        assert optimizer.step(closure=closure).item() == 10.0
        assert weight.item() == pytest.approx(0.0, abs=1e-5)


class TestSparse:
    @pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"max_norm": 0.5, "norm_type": 1.0},
                                         {"mode": "value", "clip_value": 0.1}, {"mode": "param", "max_norm": 0.5}])  # fmt: skip
    def test_weights_are_those_of_dense_gradients(self, hook, options):
        def run(*, sparse, clip=None):
            torch.manual_seed(5)
            model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                optimizer.zero_grad()
                (model(torch.tensor([1, 1, 3, 1])) * 10).square().sum().backward()
                if clip:
                    clip(model)
                optimizer.step()
            return torch.cat([p.detach().view(-1) for p in model.parameters()])

        def clip(model):
            if options.get("mode") == "value":
                clip_grad_value_(model.parameters(), 0.1)
            elif options.get("mode") == "param":
                for parameter in model.parameters():
                    clip_grad_norm_([parameter], 0.5)
            else:
                clip_grad_norm_(model.parameters(), 0.5, options.get("norm_type", 2.0))

        want, plain = run(sparse=False, clip=clip), run(sparse=False)
        hook.start("gradclip", **options)
        torch.testing.assert_close(run(sparse=True), want, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(want, plain, rtol=1e-2)

    def test_rows_are_the_units_of_an_embedding(self, hook):
        embedding = nn.Embedding(3, 2, sparse=True)
        with torch.no_grad():
            embedding.weight.fill_(1.0)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        hook.start("gradclip", mode="agc", clip_factor=0.5)
        (embedding(torch.tensor([2, 2])) * 7).sum().backward()
        optimizer.step()
        assert embedding.weight[:2].eq(1.0).all()
        torch.testing.assert_close(embedding.weight[2].detach(), torch.full((2,), 0.5))


def per_module(limit):
    """What a full backward hook of torch's that clips each gradient would be."""

    def hook(_module, grad_input, _grad_output):
        return tuple(g if g is None else g * (limit / (g.norm() + 1e-6)).clamp(max=1.0) for g in grad_input)

    return hook


class TestModule:
    @pytest.mark.parametrize("names", ["1", "1.fc", "1|2.norm", "*"])
    def test_gradients_are_those_of_torchs_full_backward_hook(self, hook, names):
        def gradients(model):
            x = torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
            (model(x) * 100).square().sum().backward()
            return [x.grad, *(p.grad for p in model.parameters())]

        oracle = net()
        for name, module in oracle.named_modules():
            if names == "*" or name in names.split("|"):
                module.register_full_backward_hook(per_module(0.5))
        want, plain = gradients(oracle), gradients(net())
        hook.start("gradclip", mode="module", max_norm=0.5, modules=names)
        got = gradients(net())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert not torch.equal(got[0], plain[0])

    def test_in_place_modules_are_no_obstacle(self, hook):
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook.start("gradclip", mode="module", max_norm=1e-3)
        (model(torch.ones(2, 6)) * 100).sum().backward()
        assert model[0].bias.grad.norm() <= 1e-3 * 2
        optimizer.step()
        assert hook.value("gradclip_norm") > 1e-3
        assert hook.value("gradclip_scale") < 1
        assert hook.value("gradclip_clipped", "module") >= 1

    def test_gradients_that_are_not_finite_pass(self, hook):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        hook.start("gradclip", mode="module", max_norm=1.0)
        (model(torch.ones(1, 2)) * math.nan).sum().backward()
        assert model[0].weight.grad.isnan().all()
        assert hook.value("gradclip_nonfinite") >= 1

    def test_half_precision_norm_does_not_overflow(self):
        norm = rules.vector_norm(torch.full((70_000,), 300.0, dtype=torch.float16), 2.0)
        assert norm.item() == pytest.approx(300 * math.sqrt(70_000), rel=1e-3)


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


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"mode": "norm"}, "needs a positive max_norm"),
            ({"mode": "value", "max_norm": 1.0}, "needs a positive clip_value"),
            ({"max_norm": -1.0}, "needs a positive max_norm"),
            ({"max_norm": "nan"}, "needs a positive max_norm"),
            ({"max_norm": "much"}, "must be a number"),
            ({"mode": "global", "max_norm": 1.0}, "one of norm, value, param, agc, module"),
            ({"max_norm": 1.0, "order": "random"}, "one of model, optimizer"),
            ({"maxnorm": 1.0}, "no such option"),
            ({"max_norm": 1.0, "norm_type": 0}, "norm_type"),
            ({"mode": "agc"}, "needs a positive clip_factor"),
            ({"mode": "agc", "clip_factor": 0.1, "eps": 0}, "eps must be positive"),
            ({"mode": "agc", "clip_factor": 0.1, "max_norm": 1.0}, "mode=agc has no max_norm"),
            ({"max_norm": 1.0, "modules": "fc"}, "mode=norm has no modules"),
            ({"max_norm": 1.0, "nonfinite": "zero"}, "one of leave, skip"),
        ],
    )
    def test_wrong_options_are_refused_with_a_reason(self, hook, options, words):
        with pytest.raises(PluginError, match=words):
            hook.start("gradclip", **options)

    def test_dry_run_of_several_ranks_is_allowed(self, hook, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        hook.start("gradclip", max_norm=1.0, dry_run=True)


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
