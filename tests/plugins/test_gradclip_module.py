"""Gradients between modules are clipped to the bits that torch's full backward hooks give."""

from __future__ import annotations

import math

import pytest
import torch
from hookd_gradclip import rules
from torch import nn

from tests.support.clipped import net

LIMIT = 1e-3


def clip(_module, grad_input, _grad_output):
    return tuple(
        g if g is None else g * (LIMIT / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1.0) for g in grad_input
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.lstm(self.norm(self.first(x)))[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.head(self.attention(hidden, hidden.tanh(), hidden.sin())[0] + hidden)


class Reused(nn.Module):
    """One module that is called twice, and a tensor that bypasses it."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.head(self.again(torch.tanh(self.again(hidden))) + self.again(hidden) + hidden)


@pytest.mark.parametrize("make", [Recurrent, Attention, Reused])
def test_weights_are_those_of_torchs_hooks(hook, make):
    def run(*, hooked):
        torch.manual_seed(3)
        model = make()
        for module in model.modules() if hooked else ():
            module.register_full_backward_hook(clip)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4, 8, requires_grad=True)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    want = run(hooked=True)
    hook.start("gradclip", mode="module", max_norm=LIMIT)
    assert torch.equal(run(hooked=False), want)
    assert hook.value("gradclip_clipped", "module") > 0


class Product(nn.Module):
    def forward(self, x, y):
        return 3.0 * x + 4.0 * y


def test_of_a_tensor_that_is_passed_in_twice_the_sum_is_clipped(hook):
    hook.start("gradclip", mode="module", max_norm=LIMIT)
    x = torch.ones(1, requires_grad=True)
    product = Product()
    hidden = x * 1
    product(hidden, hidden).sum().backward()
    assert x.grad.item() == pytest.approx(LIMIT, rel=1e-2)


@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_a_gradient_without_elements_passes(hook, norm_type):
    hook.start("gradclip", mode="module", max_norm=LIMIT, norm_type=norm_type)
    x = torch.ones(0, 4, requires_grad=True)
    nn.Linear(4, 2)(x * 1).sum().backward()
    assert x.grad.shape == (0, 4)


def per_module(limit):
    """Return a full backward hook of torch's that clips each gradient."""

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

    def test_the_norm_is_that_of_the_last_step_alone(self, hook):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        hook.start("gradclip", mode="module", max_norm=1e9)
        norms = []
        for factor in (100.0, 1.0):
            (model(torch.ones(2, 6)) * factor).sum().backward()
            optimizer.step()
            norms.append(hook.value("gradclip_norm"))
        assert norms[1] == pytest.approx(norms[0] / 100)

    def test_gradients_that_are_not_finite_pass(self, hook):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        hook.start("gradclip", mode="module", max_norm=1.0)
        (model(torch.ones(1, 2)) * math.nan).sum().backward()
        assert model[0].weight.grad.isnan().all()
        assert hook.value("gradclip_nonfinite") >= 1

    def test_half_precision_norm_does_not_overflow(self):
        norm = rules.vector_norm(torch.full((70_000,), 300.0, dtype=torch.float16), 2.0)
        assert norm.item() == pytest.approx(300 * math.sqrt(70_000), rel=1e-3)
