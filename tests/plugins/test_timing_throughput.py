"""Operations of layers against torch's own counter, and what a training does in a second."""

from __future__ import annotations

import time

import pytest
import torch
from hookd_timing.flops import cost
from hookd_timing.throughput import batch_size
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sizes = st.integers(1, 5)
EXAMPLES = settings(deadline=None, max_examples=25, phases=set(Phase) - {Phase.explain})
"""Without explanations, for which hypothesis traces every line that torch runs."""


@pytest.fixture(scope="module", autouse=True)
def _products():
    """On a CPU a recurrent layer is one operation of oneDNN, which torch does not count; without it, it is products."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(was)


def counted(module, inputs, **kwargs):
    """Let torch count a forward and its backward; the recurrent layers as the products that they are."""
    with FlopCounterMode(display=False) as forward:
        out = module(*inputs, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    with FlopCounterMode(display=False) as backward:
        if out.requires_grad:
            out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def assert_counted_as_torch_does(module, *inputs, **kwargs):
    assert tuple(cost(module, inputs, kwargs)) == counted(module, inputs, **kwargs)


def tensor(*shape, needs=True):
    return torch.randn(*shape, requires_grad=needs)


@given(st.lists(sizes, min_size=2, max_size=3), sizes, st.booleans(), st.booleans(), st.booleans())
@EXAMPLES
def test_linear(shape, out, bias, needs, trains):
    module = nn.Linear(shape[-1], out, bias=bias).requires_grad_(trains)
    assert_counted_as_torch_does(module, tensor(*shape, needs=needs))


@given(st.data(), st.integers(1, 3), st.booleans(), st.booleans())
@EXAMPLES
def test_convolutions(data, dims, transposed, needs):
    groups, kernel, stride, dilation = (data.draw(st.integers(1, 3)) for _ in range(4))
    padding = data.draw(st.integers(0, 2))
    kinds = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    channels = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    module = kinds[dims - 1 + 3 * transposed](
        *channels, kernel, stride=stride, padding=0 if transposed else padding, dilation=dilation, groups=groups
    )
    spatial = [data.draw(st.integers(7, 9)) for _ in range(dims)]
    x = tensor(data.draw(sizes), channels[0], *spatial, needs=needs)
    ours, theirs = cost(module, (x,), {}), counted(module, (x,))
    assert ours.forward == theirs[0]
    # torch 2.13 counts the gradient of a grouped weight as if there were no groups: so many times as there are.
    assert ours.backward == theirs[1] - (groups - 1) * ours.forward


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolution_with_padding_by_name(padding):
    module = nn.Conv2d(2, 4, (3, 2), padding=padding, dilation=2)
    assert_counted_as_torch_does(module, tensor(2, 2, 9, 8))


def test_convolution_without_a_batch():
    assert_counted_as_torch_does(nn.Conv2d(2, 4, 3), tensor(2, 9, 8))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dims", [2, 3])
def test_attention(batch_first, dims):
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=10, batch_first=batch_first)
    lengths = (5, 7, 7)
    shapes = [(3, n) if batch_first else (n, 3) for n in lengths] if dims == 3 else [(n,) for n in lengths]
    inputs = [tensor(*shape, width) for shape, width in zip(shapes, (8, 6, 10), strict=True)]
    assert_counted_as_torch_does(module, *inputs)


def test_attention_to_itself():
    x = tensor(3, 5, 8)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    assert_counted_as_torch_does(module, x, x, x)
    assert cost(module, (x,), {"key": x, "value": x}) == cost(module, (x, x, x), {})


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
@pytest.mark.parametrize("needs", [True, False])
def test_recurrent(kind, options, needs):
    assert_counted_as_torch_does(kind(3, 4, **options), tensor(5, 2, 3, needs=needs))


def test_projected_lstm():
    assert_counted_as_torch_does(nn.LSTM(3, 4, proj_size=2), tensor(5, 2, 3))


def test_what_cannot_be_told_is_not_guessed():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4)])
    assert cost(nn.LSTM(4, 4), (packed,), {}) is None
    assert cost(nn.ReLU(), (tensor(2, 3),), {}) is None
    assert cost(nn.LazyLinear(4), (tensor(2, 3),), {}) is None
    assert cost(nn.Linear(3, 4), (tensor(0, 3),), {}) is None


@pytest.mark.parametrize(
    ("inputs", "kwargs", "dim", "samples"),
    [
        ((torch.ones(6, 3),), {}, 0, 6),
        ((torch.ones(6, 3),), {}, 1, 3),
        ((torch.ones(6, 3),), {}, -1, 0),
        ((torch.ones(()),), {}, 0, 0),
        ((), {"input_ids": torch.ones(6, 3), "mask": torch.ones(1)}, 0, 6),
        (({"id": "a", "x": torch.ones(6, 3)},), {}, 0, 6),
        (([torch.ones(3, 8, 8), torch.ones(3, 9, 9)],), {}, 0, 0),
        ((), {}, 0, 0),
    ],
)
def test_batch_is_told_by_the_first_argument_or_not_at_all(inputs, kwargs, dim, samples):
    assert batch_size(inputs, kwargs, dim) == samples


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, steps, micro_batches=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = nn.CrossEntropyLoss()(model(torch.randn(6, 4)), torch.zeros(6, dtype=torch.long))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def flops_of_a_step():
    model = net()
    with FlopCounterMode(display=False) as counter:
        train(model, 1)
    return counter.get_total_flops()


def test_operations_and_samples_are_those_of_the_steps(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=1)
    train(net(), 3, micro_batches=2)
    assert hook.value("timing_flops") == 6 * per_step
    assert hook.value("timing_samples") == 6 * 6, "the loss is no sample, a micro-batch is"


def test_sampled_step_stands_for_the_others(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=5)
    model = net()
    train(model, 10)
    assert hook.value("timing_flops") == 10 * per_step
    assert hook.value("timing_samples") == 10 * 6


def test_evaluation_trains_on_no_samples_and_waits_for_no_backward(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=1)
    model = net()
    with torch.no_grad():
        model.eval()(torch.randn(6, 4))
    model.train()
    train(model, 1)
    forward = sum(cost(layer, (torch.ones(6, layer.in_features),), {}).forward for layer in (model[0], model[2]))
    assert hook.value("timing_flops") == per_step + forward
    assert hook.value("timing_samples") == 6


def test_rates_are_those_of_the_last_second(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=1, peak_flops="1e6")
    model = net()
    began = time.perf_counter()
    steps = 0
    while "timing_mfu_ratio" not in names(hook):
        train(model, 1)
        steps += 1
        assert time.perf_counter() - began < 60
    rate = hook.value("timing_steps_per_second")
    assert 0 < rate <= steps
    assert hook.value("timing_samples_per_second") == pytest.approx(6 * rate)
    assert hook.value("timing_flops_per_second") == pytest.approx(per_step * rate)
    assert hook.value("timing_mfu_ratio") == pytest.approx(per_step * rate / 1e6)


def test_without_a_peak_there_is_no_mfu(hook):
    hook.start("timing", every=1)
    model = net()
    while "timing_flops_per_second" not in names(hook):
        train(model, 1)
    assert "timing_mfu_ratio" not in names(hook)


def names(hook):
    return {f.name.removeprefix("hookd_") for f in hook.reader.read().families if f.series}
