"""hookd_gradclip where a norm, but no gradient, is infinite: there it does what torch's own functions do."""

from __future__ import annotations

import math

import pytest
import torch
from hookd_gradclip import rules
from torch import nn
from torch.nn.utils import clip_grad_norm_

OVERFLOWS = [(torch.float32, 1e19, 2.0), (torch.float32, 1e38, 1.0), (torch.float16, 500.0, 2.0)]


def weights(dtype, value):
    """Return two parameters whose gradients are finite, but whose norm is not, in their type."""
    made = [nn.Parameter(torch.ones(200, 200, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))]
    for weight in made:
        weight.grad = torch.full_like(weight, value)
    return made


@pytest.fixture(params=[True, False], ids=["host", "device"])
def _place(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(rules, "on_host", lambda _tensor: False)


@pytest.mark.usefixtures("_place")
class TestOverflow:
    @pytest.mark.parametrize("case", OVERFLOWS)
    @pytest.mark.parametrize("nonfinite", ["leave", "skip"])
    @pytest.mark.parametrize("mode", ["norm", "param"])
    def test_gradients_are_those_of_the_script(self, hook, mode, nonfinite, case):
        dtype, value, norm_type = case
        script, ours = weights(dtype, value), weights(dtype, value)
        for together in [script] if mode == "norm" else [[one] for one in script]:
            clip_grad_norm_(together, 0.5, norm_type)
        hook.start("gradclip", mode=mode, max_norm=0.5, norm_type=norm_type, nonfinite=nonfinite)
        torch.optim.SGD(ours, lr=1.0).step()
        hook.stop()  # what is read from a device has arrived then
        assert script[0].grad.eq(0).all(), "the norm is finite: the test proves nothing"
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, script, strict=True))
        assert hook.value("gradclip_nonfinite") == hook.value("gradclip_skipped") == 0

    @pytest.mark.parametrize("options", [{"max_norm": 1e-7}, {"mode": "param", "max_norm": 1e-7}])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_no_limit_is_too_small_to_leave_a_bad_step_alone(self, hook, options, bad):
        ours = weights(torch.float32, 1.0)
        ours[1].grad[0] = bad
        hook.start("gradclip", **options)
        torch.optim.SGD(ours, lr=0.0).step()
        assert ours[0].grad.eq(1).all()
        assert ours[1].grad[1:].eq(1).all()

    @pytest.mark.parametrize("max_norm", [1e-7, 1e-9])
    def test_a_tiny_limit_clips_as_the_script(self, hook, max_norm):
        script, ours = weights(torch.float32, 1.0), weights(torch.float32, 1.0)
        clip_grad_norm_(script, max_norm)
        hook.start("gradclip", max_norm=max_norm)
        torch.optim.SGD(ours, lr=1.0).step()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, script, strict=True))

    def test_a_gradient_between_modules(self, hook):
        model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 1))
        hook.start("gradclip", mode="module", max_norm=0.5, modules="1")
        (model(torch.ones(300, 6)) * 1e19 * 1e19).sum().backward()
        assert model[0].weight.grad.eq(0).all()
        assert hook.value("gradclip_nonfinite") == 0


def test_what_is_shown(hook):
    optimizer = torch.optim.SGD(ours := weights(torch.float32, 1e38), lr=0.0)
    hook.start("gradclip", max_norm=0.5)
    optimizer.step()
    assert hook.value("gradclip_norm") == math.inf
    assert hook.value("gradclip_scale") == 0
    assert hook.value("gradclip_clipped", "norm") == 1
    ours[0].grad[0] = math.inf
    optimizer.step()
    assert math.isnan(hook.value("gradclip_norm"))
    assert hook.value("gradclip_scale") == 1
    assert hook.value("gradclip_nonfinite") == hook.value("gradclip_clipped", "norm") == 1
