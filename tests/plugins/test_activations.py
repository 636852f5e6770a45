"""hookd_activations gives the numbers that torch gives in float64, for every kind of output."""

from __future__ import annotations

import math

import hookd_activations
import pytest
import torch
from hookd_activations import CHUNK, device_stats, stats
from torch import nn

from hookd import PluginError

NAN, INF = math.nan, math.inf
NAMES = ("mean", "std", "min", "max", "zero_ratio")


def expected(tensor):
    """The definitions, in float64."""
    x = tensor.double()
    finite = x[x.isfinite()]
    zeros = float((x == 0).double().mean())
    return (*(float(f) for f in (finite.mean(), finite.std(correction=0), finite.min(), finite.max())), zeros)


def shown(hook, module):
    return tuple(hook.value(f"activations_{name}", module) for name in NAMES)


TENSORS = {
    "normal": lambda: torch.randn(1000),
    "one element": lambda: torch.tensor([3.0]),
    "a scalar": lambda: torch.tensor(3.0),
    "constant": lambda: torch.full((100,), 0.1),
    "relu": lambda: torch.randn(50, 40).relu(),
    "mean 1000, std 1": lambda: torch.randn(200_000) + 1000,
    "mean 1e4, std 0.01": lambda: torch.randn(200_000, dtype=torch.float64) * 0.01 + 1e4,
    "several chunks": lambda: torch.randn(3 * CHUNK + 17),
    "drifting": lambda: torch.arange(4 * CHUNK, dtype=torch.float32),
    "huge": lambda: torch.randn(1000) * 1e30,
    "tiny": lambda: torch.randn(1000) * 1e-30,
    "bfloat16": lambda: (torch.randn(100_000) + 3).to(torch.bfloat16),
    "float16": lambda: (torch.randn(100_000) * 100).to(torch.half),
    "transposed": lambda: torch.randn(100, 200).t(),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(100, 10)[:, ::3],
    "expanded": lambda: torch.randn(10, 1).expand(10, 20),
}


@pytest.mark.parametrize("name", TENSORS)
def test_statistics_are_those_of_float64(name):
    torch.manual_seed(0)
    x = TENSORS[name]()
    assert stats(x) == pytest.approx(expected(x), rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("name", [n for n in TENSORS if n not in ("huge", "tiny", "mean 1e4, std 0.01")])
def test_statistics_made_on_a_device_are_the_same(name):
    torch.manual_seed(0)
    x = TENSORS[name]()
    assert device_stats(x).tolist() == pytest.approx(expected(x), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("make", [stats, lambda x: device_stats(x).tolist()])
def test_what_is_not_finite_is_left_out(make):
    x = torch.tensor([1.0, NAN, 3.0, INF, -INF, 0.0])
    assert make(x) == pytest.approx(expected(x), rel=1e-6)
    assert make(x)[2:] == pytest.approx((0.0, 3.0, 1 / 6))


@pytest.mark.parametrize("make", [stats, lambda x: device_stats(x).tolist()])
def test_nothing_finite_gives_nan(make):
    *four, zeros = make(torch.tensor([NAN, INF]))
    assert all(math.isnan(v) for v in four)
    assert zeros == 0.0


def test_input_is_not_modified():
    x = torch.randn(3 * CHUNK)
    copy = x.clone()
    stats(x)
    assert torch.equal(x, copy)


def test_gauges_show_the_last_sampled_step(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=3)
    for step in range(1, 7):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        out = model(x)
        if step == 4:
            hidden = model[0].forward(x)
            want = {"0": hidden, "1": hidden.relu(), "2": out, "(root)": out}
        out.sum().backward()
        optimizer.step()
    for module, tensor in want.items():
        assert shown(hook, module) == pytest.approx(expected(tensor.detach()), rel=1e-5)


def test_first_step_is_sampled(hook):
    model = nn.Linear(4, 8)
    hook.start("activations")
    out = model(torch.randn(3, 4))
    assert shown(hook, "(root)") == pytest.approx(expected(out.detach()), rel=1e-5)


class Form(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: {"ids": torch.arange(3), "logits": x, "loss": x.sum()},
        lambda x: (torch.arange(3), x),
        lambda x: [None, {"deep": (x,)}],
        lambda x: x.relu_(),
    ],
)
def test_first_floating_tensor_of_a_nested_output_is_taken(hook, form):
    hook.start("activations")
    x = torch.rand(100) + 1
    Form(form)(x)
    assert shown(hook, "(root)") == pytest.approx(expected(x), rel=1e-5)


@pytest.mark.parametrize(
    "value",
    [None, torch.arange(3), torch.empty(0), torch.ones(3, dtype=torch.complex64), torch.empty(3, device="meta"),
     torch.ones(3).to_sparse()],
)  # fmt: skip
def test_outputs_without_real_numbers_have_no_series(hook, value):
    hook.start("activations")
    Form(lambda _: value)(torch.ones(1))
    assert hook.metric("activations_mean") == {}


def test_modules_are_selected_by_name_and_depth(hook):
    def model():
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))

    hook.start("activations", modules="0.*|1")
    model()(torch.ones(2))
    assert set(hook.metric("activations_mean")) == {("0.0",), ("0.1",), ("1",)}
    hook.stop()
    hook.reader.close()
    hook.start("activations", depth=1)
    model()(torch.ones(2))
    assert set(hook.metric("activations_mean")) == {("(root)",), ("0",), ("1",)}


def test_depth_must_not_be_negative(hook):
    with pytest.raises(PluginError, match="depth"):
        hook.start("activations", depth=-3)


def test_what_is_on_a_device_is_read_at_the_end_of_a_step(hook, monkeypatch):
    monkeypatch.setattr(hookd_activations, "on_host", lambda _tensor: False)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook.start("activations")
    out = model(torch.randn(3, 4))
    assert hook.metric("activations_mean") == {}
    out.sum().backward()
    optimizer.step()
    assert shown(hook, "(root)") == pytest.approx(expected(out.detach()), rel=1e-5)


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("activations", every=1)
    assert torch.equal(weights(), plain)
