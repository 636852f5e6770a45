"""Tensors that `nan` infers to be finite without reading them (`hookd_nan.inferred_finite`); origins stay exact."""

from __future__ import annotations

import math

import pytest
import torch
from hookd_nan.inferred_finite import PRESERVES, PROPAGATES
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hookd import Plugin, hookimpl

SHAPES = {
    "Linear": (2, 40), "BatchNorm1d": (4, 6), "BatchNorm2d": (2, 6, 3, 3), "BatchNorm3d": (2, 6, 2, 2, 2), "GroupNorm": (2, 6, 5),
}  # fmt: skip
"""All others get (2, 40): a part that torch computes in vectors, and a rest."""
ARGUMENTS = {"Linear": (40, 5), "GroupNorm": (2, 6), "LayerNorm": (40,), "RMSNorm": (40,), "Softmax": (-1,)}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def made(kind: type[nn.Module], dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...]]:
    name = kind.__name__
    arguments = (6,) if name.startswith("BatchNorm") else ARGUMENTS.get(name, ())
    torch.manual_seed(0)
    return kind(*arguments).to(dtype), SHAPES.get(name, (2, 40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(PROPAGATES, key=lambda kind: kind.__name__))
@pytest.mark.parametrize("training", [True, False])
def test_what_propagates_gives_back_something_bad_wherever_its_input_is(kind, dtype, training):
    module, shape = made(kind, dtype)
    module.train(training)
    for value in (math.nan, math.inf, -math.inf):
        for at in range(math.prod(shape)):
            x = torch.randn(shape, dtype=dtype)
            x.view(-1)[at] = value
            assert not module(x).isfinite().all(), (value, at)


def test_what_propagates_does_so_where_its_weights_are_0():
    for kind in sorted(PROPAGATES - {nn.GELU, nn.SiLU, nn.Dropout}, key=lambda kind: kind.__name__):
        module, shape = made(kind, torch.float32)
        for training in (True, False):
            module.train(training)
            nn.init.zeros_(module.weight)
            x = torch.randn(shape)
            x.view(-1)[0] = math.inf
            assert not module(x).isfinite().all(), (kind, training)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(PRESERVES, key=lambda kind: kind.__name__))
def test_what_preserves_makes_nothing_bad_of_any_finite_number(kind, dtype):
    module, shape = made(kind, dtype)
    info = torch.finfo(dtype)
    ends = [info.max, info.min, info.tiny, -info.tiny, 0.0, -0.0, 1.0, -1.0, 1e3, -1e3, info.max / 2, info.min / 2]
    for _ in range(200):
        x = torch.tensor(ends, dtype=dtype)[torch.randint(len(ends), shape)]
        assert module(x).isfinite().all(), x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_other_gelu_tells_as_well(dtype):
    for value in (math.nan, math.inf, -math.inf):
        for at in range(40):
            x = torch.randn(40, dtype=dtype)
            x[at] = value
            assert not nn.GELU("tanh")(x).isfinite().all(), (value, at)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 512), nn.GELU(), nn.Linear(512, 4))  # fmt: skip


BATCH = torch.Generator().manual_seed(1)


def train(net: nn.Module, steps: int, strike: int = 0, at: str = "", rows: int = 600) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for step in range(1, steps + 1):
        if step == strike:
            net.get_submodule(at).register_forward_hook(lambda _m, _i, output: output * math.nan)
        net(torch.randn(rows, 3, 8, 8, generator=BATCH)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("at", ["0", "1", "2", "3", "4", "5", "6"])
def test_an_origin_is_named_all_the_same(hook, at):
    net = chain()
    hook.start("nan", every=1)
    train(net, 5, strike=4, at=at)
    incident = hook.incident
    assert (incident.module, incident.fields["where"], incident.kind, incident.step) == (at, "output", "nan", 4)
    assert incident.fields["is_exact"]


def test_less_than_half_of_a_chain_is_read(hook, monkeypatch):
    net, read = chain(), []
    hook.start("nan", every=1)
    context = hook.context("nan")
    train(net, 3)
    largest = context.largest

    def counted(tensors):
        read.append([tuple(one.shape) for one in tensors])
        return largest(tensors)

    monkeypatch.setattr(context, "largest", counted)
    net(torch.randn(600, 3, 8, 8, generator=BATCH))
    shapes = [shape for portion in read for shape in portion]
    assert shapes == [(600, 4)], (
        "hookd has read the one that is changed in place; what keeps its input, and what the last tells of"
    )


def test_all_is_read_where_a_hook_may_have_made_it_good(hook):
    net = chain()
    hook.start("nan", every=1)
    train(net, 4)
    net[6].register_forward_pre_hook(lambda _m, args: (args[0].nan_to_num(0.0),))
    train(net, 2, strike=2, at="5")
    assert hook.incident.module == "5"
    assert hook.incident.fields["is_exact"]


def test_all_is_read_where_a_hook_of_all_modules_may_have_made_it_good(hook):
    def clean(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        return (args[0].nan_to_num(0.0),) if isinstance(module, nn.Linear) else None

    net = chain()
    hook.start("nan", every=1)
    train(net, 4)
    handle = register_module_forward_pre_hook(clean)
    try:
        train(net, 2, strike=2, at="5")
    finally:
        handle.remove()
    assert hook.incident.module == "5"


def test_all_is_read_where_a_plugin_may_have_made_it_good(hook):
    class Cleans(Plugin):
        name = "cleans"
        mutates = True

        @hookimpl
        def forward(self, module, output):
            return output.nan_to_num(0.0) if module.name == "6" else None

    hook.start("nan", Cleans, every=1)
    net = chain()
    train(net, 4)
    train(net, 2, strike=2, at="5")
    assert [one.module for one in hook.incidents if one.plugin == "nan"] == ["5"]
