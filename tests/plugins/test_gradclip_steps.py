"""hookd_gradclip in steps that are not ordinary: gradients that are not finite, closures, sparse gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.clipped import net


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


class TestComplex:
    @pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"mode": "param", "max_norm": 0.5}])
    def test_norms_clip_them_as_torch_does(self, hook, options):
        def run(clip):
            weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            weight.grad = torch.tensor([3 + 4j, 1j, 2], dtype=torch.complex64)
            clip(weight)
            optimizer.step()
            return weight.tolist()

        want = run(lambda weight: clip_grad_norm_([weight], 0.5))
        hook.start("gradclip", **options)
        assert run(lambda _: None) == want


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
