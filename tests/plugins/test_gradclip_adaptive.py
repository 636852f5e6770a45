"""hookd_gradclip by the size of the weights: units, and the formula of the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.clipped import both, net, train


def units_of(parameter):
    """Return the indices of a parameter's units, as the paper counts them: rows; of a vector all of it."""
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

    def test_scale_is_the_limit_over_the_largest_ratio(self, hook):
        hook.start("gradclip", mode="agc", clip_factor=1e-6)
        weight = nn.Parameter(torch.ones(1, 4))
        weight.grad = torch.full((1, 4), 1e-5)
        torch.optim.SGD([weight], lr=0.1).step()
        assert hook.value("gradclip_norm") == pytest.approx(1e-5)
        assert hook.value("gradclip_scale") == pytest.approx(0.1)
