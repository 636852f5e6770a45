"""Operations of layers, compared with torch's own counter, and a training's throughput per second."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from hookd_timing import throughput
from hookd_timing.flops import cost
from hookd_timing.peak import peak_flops
from hookd_timing.throughput import batch_size
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hookd

sizes = st.integers(1, 5)
EXAMPLES = settings(deadline=None, max_examples=25, phases=set(Phase) - {Phase.explain})
"""Without the phase `explain`, in which hypothesis traces every line that torch runs."""


@pytest.fixture(scope="module", autouse=True)
def _products():
    """On a CPU a recurrent layer is one operation of oneDNN, which torch does not count; without oneDNN, it is products."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(was)


def counted(module, inputs, **kwargs):
    """Return torch's own counts of a forward and its backward; recurrent layers count as the products that they are."""
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
    # torch 2.13 counts the gradient of a grouped weight as if there were no groups: once too often for each other group.
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


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}])
def test_attention_with_more_to_look_at(options):
    x = tensor(3, 5, 8)
    assert_counted_as_torch_does(nn.MultiheadAttention(8, 2, batch_first=True, **options), x, x, x)


def test_attention_in_one_kernel_takes_as_much_as_its_products():
    x = tensor(2, 5, 8)
    with sdpa_kernel(SDPBackend.MATH):  # torch 2.13 does not count the kernel of a CPU
        assert_counted_as_torch_does(nn.MultiheadAttention(8, 2, batch_first=True), x, x, x, need_weights=False)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}])
@pytest.mark.parametrize("needs", [True, False])
def test_recurrent(kind, options, needs):
    assert_counted_as_torch_does(kind(3, 4, **options), tensor(5, 2, 3, needs=needs))


def test_projected_lstm():
    assert_counted_as_torch_does(nn.LSTM(3, 4, proj_size=2), tensor(5, 2, 3))


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer(8, 2, 16), nn.TransformerDecoderLayer(8, 2, 16)])
def test_transformer_layers_are_the_sum_of_what_they_call(hook, layer):
    inputs = [tensor(5, 3, 8) for _ in range(1 + isinstance(layer, nn.TransformerDecoderLayer))]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(*inputs).sum().backward()
    hook.start("timing", every=1)
    layer(*inputs).sum().backward()
    assert hook.value("timing_flops") == counter.get_total_flops()


def test_a_call_that_torch_refuses_takes_none():
    layer = nn.Conv1d(1, 1, 1, stride=0)
    assert cost(layer, (tensor(1, 1, 2),), {}) is None
    with pytest.raises(RuntimeError, match="stride"):
        layer(tensor(1, 1, 2))


def test_layers_without_products_take_none():
    for layer in (nn.Embedding(10, 4), nn.EmbeddingBag(10, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Dropout()):
        inputs = [torch.zeros(2, 4, dtype=torch.long)] if "Embedding" in type(layer).__name__ else [tensor(2, 4)]
        assert counted(layer, inputs) == (0, 0)
        assert cost(layer, tuple(inputs), {}) is None


def test_an_unknown_is_not_guessed():
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
def test_batch_is_read_from_the_first_argument_or_not_at_all(inputs, kwargs, dim, samples):
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
    assert hook.value("timing_samples") == 6 * 6, "a micro-batch is a sample, the loss is not"


def test_sampled_step_stands_for_the_operations_of_others_and_all_samples_are_counted(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=5)
    train(net(), 10, micro_batches=2)
    assert hook.value("timing_flops") == 10 * 2 * per_step
    assert hook.value("timing_samples") == 10 * 2 * 6


def test_of_steps_that_take_turns_each_kind_is_counted(hook):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook.start("timing", every=1)
    for step in range(200):
        model(torch.randn(2 + 2 * (step % 2), 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hook.value("timing_samples") == 200 * 3


def test_evaluation_counts_for_nothing_however_long_it_is(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=2)
    model = net()
    for _ in range(3):
        with torch.no_grad():
            for _ in range(20):
                model.eval()(torch.randn(6, 4))
        model.train()
        train(model, 2)  # the evaluation is always in a sampled step
    assert hook.value("timing_flops") == 6 * per_step
    assert hook.value("timing_samples") == 6 * 6


def test_training_in_eval_mode_is_training(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=1)
    train(net().eval(), 3)  # as when normalization is frozen
    assert hook.value("timing_flops") == 3 * per_step
    assert hook.value("timing_samples") == 2 * 6, "the first call is known to be training when its backward begins"


def test_teacher_does_not_count_for_the_training(hook):
    student, teacher = net(), nn.Linear(4, 200).requires_grad_(False)
    per_step = flops_of_a_step()
    hook.start("timing", every=1)
    for _ in range(2):
        teacher(torch.randn(6, 4))
        train(student, 1)
    assert hook.value("timing_flops") == 2 * per_step
    assert hook.value("timing_samples") == 2 * 6


def test_model_that_is_called_twice_in_a_step_takes_twice_as_much(hook):
    per_step = flops_of_a_step()
    hook.start("timing", every=1)
    optimizer = torch.optim.SGD((model := net()).parameters(), lr=0.01)
    for _ in range(2):
        (model(torch.randn(6, 4)) - model(torch.randn(6, 4))).square().sum().backward()
        optimizer.step()
    assert hook.value("timing_flops") == 2 * 2 * per_step
    assert hook.value("timing_samples") == 2 * 2 * 6


def test_model_that_is_gone_is_no_longer_the_largest(hook):
    hook.start("timing", every=1)
    train(nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)), 1)
    gc.collect()
    train(net(), 2)
    assert hook.value("timing_samples") == 3 * 6


def adversaries():
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, generator)]

    def step():
        made = generator(torch.randn(6, 3))
        (critic(torch.randn(6, 4)).mean() - critic(made.detach()).mean()).backward()
        optimizers[0].step()
        critic(made).mean().backward()
        optimizers[1].step()

    return step


def test_two_models_that_take_turns_count_together(hook):
    step = adversaries()
    with FlopCounterMode(display=False) as counter:
        step()
    hook.start("timing", every=1, count_every=1)
    for _ in range(4):
        step()
    assert hook.value("timing_flops") == 4 * counter.get_total_flops()
    # Each call of the larger model, whose loss goes backward; the last one belongs to a step that is not over.
    assert hook.value("timing_samples") == (4 * 3 - 1) * 6
    assert hook.value("timing_forward_calls", "(root)") == 4 * 3


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.zeros(3, 7, dtype=torch.int64)}, 21),
        ({"input_ids": torch.zeros(3, dtype=torch.int32)}, 0),
        ({"input_ids": torch.zeros(3, 7)}, 0),
    ],
)
def test_tokens_are_counted_if_the_input_is_token_ids(hook, batch, tokens):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, input_ids):
            return input_ids.float().mean() * self.scale

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("timing", every=1)
    for _ in range(4):
        for _ in range(2):
            model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert hook.value("timing_samples") == 4 * 2 * 3
    assert hook.metric("timing_tokens") == ({(): 4 * 2 * tokens} if tokens else {})


def test_the_peak_is_published_if_it_is_known(hook):
    hook.start("timing", every=1, peak_flops="1e6")
    train(net(), 1)
    assert hook.value("timing_peak_flops_per_second") == 1e6
    hook.configure("timing", peak_flops="2e6")
    train(net(), 1)
    assert hook.value("timing_peak_flops_per_second") == 2e6


def test_the_gpu_is_named_as_its_exporter_names_it(hook, monkeypatch):
    uuid = "2f1f0c9a-6f0b-4e0e-9d3c-4f0a5a5e7b11"
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(
        throughput,
        "of_tensor",
        lambda tensor, name: torch.device("cuda", 3) if name == "device" else hookd.of_tensor(tensor, name),
    )
    hook.start("timing", every=1)
    train(net(), 2)
    assert hook.metric("timing_device_info") == {("cuda:3", f"GPU-{uuid}", "NVIDIA H200"): 1.0}
    assert hook.value("timing_peak_flops_per_second") == 989.5e12


def test_without_a_peak_there_is_no_series_of_it(hook):
    hook.start("timing", every=1)
    train(net(), 2)
    assert "timing_flops" in names(hook)
    assert "timing_peak_flops_per_second" not in names(hook)


def names(hook):
    return {f.name.removeprefix("hookd_") for f in hook.read().families if f.series}


PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA A10": 125e12,
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla V100S-PCIE-32GB": 130e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12,
}
UNKNOWN = ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A100-SXM-64GB", "NVIDIA H200 NVL",
           "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H800", "NVIDIA H20", "NVIDIA A10G", "NVIDIA A100X", "NVIDIA A16",
           "NVIDIA L40G", "Tesla V100-SXM3-32GB", "NVIDIA T400 4GB", "AMD Instinct MI250", "AMD Instinct MI300A",
           "NVIDIA GeForce RTX 4090", "")  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_peak_is_that_of_the_device(name):
    assert peak_flops(name, 304) == PEAKS[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_peak_of_a_part_or_of_another_device_is_not_guessed(name):
    assert peak_flops(name, 304) is None


def test_partition_with_the_whole_ones_name_has_no_peak():
    assert peak_flops("AMD Instinct MI300X", 38) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_dim": -2}, "batch_dim must be the number of a dimension, or -1 for none, not -2"),
        ({"batch_dim": "first"}, "batch_dim must be a whole number, not 'first'"),
        ({"peak_flops": 0}, "peak_flops must be operations per second, more than 0, not 0"),
        ({"peak_flops": "nan"}, "more than 0, not nan"),
        ({"peak_flops": "inf"}, "more than 0, not inf"),
        ({"peak_flops": "312T"}, "peak_flops must be a number, not '312T'"),
        ({"every": 0}, "every must be at least 1, not 0"),
        ({"peak_flop": 1}, "no such option: 'peak_flop'"),
    ],
)
def test_bad_options_are_refused_with_what_is_right(options, says):
    with pytest.raises(hookd.PluginError, match=re.escape(says)):
        hookd.start([("timing", options)], run="test")


def test_a_lazy_module_is_no_error_and_counts_from_its_second_call_on(hook):
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))
    hook.start("timing", every=1, count_every=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(4):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    assert hook.errors == {}
    assert hook.value("timing_samples") > 0
