"""hookd_drift's checksums: every bit counts, only replicated tensors are included, at the same marks on all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hookd_drift import is_due, mixed
from hookd_drift.bits import INTEGERS, joined, pieces, sum_of
from hookd_drift.replicas import owners
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookd import Plugin, hookimpl

EVERY = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def train(model, steps=EVERY + 2, *, reduces=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        if reduces:
            dist.all_reduce(torch.ones(1))
        optimizer.step()


def bits_of(tensor):
    """Return the sum by Python's own numbers, over the same 64-bit words; what remains in words of an element."""
    flat = tensor.detach().reshape(-1)
    data = bytes(flat.contiguous().view(torch.uint8).tolist())
    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, whole, 8)]
    size = flat.element_size()
    words += [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(whole, len(data), size)]
    return sum(words) % 2**64


def read(tensor):
    (found,) = joined([float(piece) for piece in pieces(sum_of(tensor).reshape(1))], 1)
    return found


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_the_sum_is_that_of_the_bits(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    assert read(tensor) == bits_of(tensor)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_tensor_may_begin_anywhere(offset):
    assert isinstance(read(torch.randn(65)[offset:]), int)
    assert read(torch.randn(65)[offset:].fill_(0.0)) == 0


def test_gaps_and_orders_of_memory_do_not_matter():
    image = torch.randn(2, 3, 4, 4)
    assert read(image.to(memory_format=torch.channels_last)) == bits_of(image.permute(0, 2, 3, 1))
    assert read(torch.randn(6, 6).t()[1:, ::2].fill_(0.0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_flipped_bit_changes_the_checksum_whichever_it_is(dtype):
    tensor = torch.randn(9).to(dtype)
    sound = mixed(3, read(tensor))
    words = tensor.view(INTEGERS[tensor.element_size()])
    for at, bit in itertools.product(range(9), range(8 * tensor.element_size())):
        before = words[at].item()
        sign = bit == 8 * tensor.element_size() - 1
        words[at] = before ^ ((1 << bit) - (2 ** (bit + 1) if sign else 0))
        changed = mixed(3, read(tensor))
        assert changed != sound
        assert changed < 2**52
        words[at] = before


def test_every_rank_chooses_the_same_marks_wherever_it_was_attached():
    marks = [*range(3, 400, 3)]
    steps = [(before, mark) for before, mark in itertools.pairwise(marks) if is_due(before, mark, 10)]
    assert [mark for _, mark in steps] == [mark for mark in marks[1:] if mark % 30 < 3]
    assert not is_due(7, 7, 1)


def test_the_checksum_of_a_module_tells_of_one_ulp_and_the_others_stay(hook, group):
    hook.start("drift", every=EVERY)
    model = DistributedDataParallel(Net())
    train(model, 2 * EVERY)
    before, mark, step = (hook.metric(f"drift_{name}") for name in ("checksum", "mark", "step"))
    assert set(before) == {("first",), ("norm",), ("second",)}
    model.module.second.weight.data.view(torch.int32)[0, 3] += 1
    model.module.norm.running_mean += 1
    train(model, EVERY)
    after = hook.metric("drift_checksum")
    assert [name for name in before if before[name] != after[name]] == [("second",)]
    assert hook.value("drift_mark") > mark[()]
    assert hook.value("drift_step") - step[()] == EVERY


def test_gradients_are_summed_up_instead_where_that_is_wanted(hook, group):
    hook.start("drift", every=EVERY, what="gradients")
    model = DistributedDataParallel(Net())
    train(model)
    before = hook.metric("drift_checksum")
    train(model, EVERY)
    assert all(before[name] != value for name, value in hook.metric("drift_checksum").items() if name != ("norm",))


def test_a_model_that_nobody_replicates_is_left_alone(hook, group):
    hook.start("drift", every=EVERY)
    train(Net(), reduces=True)
    assert not hook.metric("drift_checksum")


def test_all_models_are_summed_up_where_that_is_wanted(hook, group):
    hook.start("drift", every=EVERY, replicated="all")
    train(Net(), reduces=True)
    assert set(hook.metric("drift_checksum")) == {("first",), ("norm",), ("second",)}


def test_without_collectives_there_is_nothing_to_compare_at(hook, group):
    hook.start("drift", every=EVERY, replicated="all")
    train(Net())
    assert not hook.metric("drift_checksum")


def test_parameters_of_which_each_rank_holds_another_part_are_left_out(hook, group):
    tensor_parallel = pytest.importorskip("torch.distributed.tensor")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    net = Net()
    whole = net.second.weight.data
    net.register_parameter(
        "part",
        nn.Parameter(tensor_parallel.distribute_tensor(whole, mesh, [tensor_parallel.Shard(0)]), requires_grad=False),
    )
    net.first.bias.allreduce = False  # as experts' are in Megatron and DeepSpeed
    hook.start("drift", every=EVERY, replicated="all")
    train(net, reduces=True)
    layout, before = hook.value("drift_layout"), hook.metric("drift_checksum")
    net.first.bias.data += 1
    net.part.to_local().add_(1)
    train(net, EVERY, reduces=True)
    assert set(before) == {("first",), ("norm",), ("second",)}
    assert (hook.value("drift_layout"), hook.metric("drift_checksum")) == (layout, before)


def test_fully_sharded_models_are_left_alone(hook, group):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    net = Net()
    fsdp.fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    hook.start("drift", every=EVERY, replicated="all")
    train(net, reduces=True)
    assert not hook.metric("drift_checksum")


def test_what_is_ignored_by_ddp_is_left_out(hook, group):
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["second.weight", "second.bias"])
    hook.start("drift", every=EVERY)
    train(DistributedDataParallel(net))
    assert set(hook.metric("drift_checksum")) == {("first",), ("norm",)}


def test_another_shape_is_another_layout(hook, group):
    hook.start("drift", every=EVERY)
    net = Net()
    train(DistributedDataParallel(net))
    before = hook.value("drift_layout")
    net.second = nn.Linear(8, 2)
    train(DistributedDataParallel(net))
    assert hook.value("drift_layout") != before


def test_the_weights_are_those_of_a_training_without_it(hook, group):
    def weights():
        torch.manual_seed(1)
        net = Net()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in net.parameters()] + [torch.rand(3)]

    plain = weights()
    hook.start("drift", every=1)
    assert all(torch.equal(one, other) for one, other in zip(plain, weights(), strict=True))


def test_modules_are_joined_where_there_are_too_many():
    names = [f"blocks.{n}.{part}.weight" for n in range(3) for part in "ab"] + ["head.weight", "scale"]
    assert set(owners(names, 64)) == {f"blocks.{n}.{part}" for n in range(3) for part in "ab"} | {"head", "(root)"}
    assert set(owners(names, 5)) == {"blocks.0", "blocks.1", "blocks.2", "head", "(root)"}
    assert set(owners(names, 3)) == {"blocks", "head", "(root)"}
    assert set(owners(names, 1)) == {"(root)"}
    of_two_roots = ["0.weight", "#Critic.0.weight", "#Critic.scale"]
    assert owners(of_two_roots, 3) == ["0", "#Critic.0", "#Critic.(root)"]
    assert owners(of_two_roots, 2) == ["(root)", "#Critic.(root)", "#Critic.(root)"]
    assert owners(of_two_roots, 1) == ["(root)"] * 3


class Critic(nn.Sequential):
    pass


def test_modules_of_each_model_have_the_names_that_all_metrics_give_them(hook, group):
    hook.start("drift", every=EVERY, replicated="all")
    critic, net = Critic(nn.Linear(4, 1)), Net()  # the smaller one is called first
    optimizer = torch.optim.SGD([*critic.parameters(), *net.parameters()], lr=0.0)
    for _ in range(4 * EVERY):
        optimizer.zero_grad()
        (critic(torch.randn(16, 4)).mean() + net(torch.randn(16, 4)).mean()).backward()
        dist.all_reduce(torch.ones(1))
        optimizer.step()
    assert set(hook.metric("drift_checksum")) == {("first",), ("norm",), ("second",), ("#Critic.0",)}


@pytest.mark.parametrize(
    ("option", "value"), [("modules", "0"), ("what", "weights"), ("replicated", "some"), ("every", "0")]
)
def test_options_that_mean_nothing_are_refused(hook, option, value):
    with pytest.raises(Exception, match=option):
        hook.start("drift", **{option: value})


class Reader(Plugin):
    name = "reader"

    @hookimpl
    def configure(self, context):
        type(self).context = context


def test_parameters_on_the_meta_device_and_empty_ones_are_left_out(hook, group):
    from hookd_drift.replicas import replicas

    net = nn.Module()
    net.empty = nn.Parameter(torch.empty(0))
    net.meta = nn.Parameter(torch.empty(3, device="meta"))
    net.whole = nn.Parameter(torch.ones(3))
    hook.start(Reader)
    found = replicas([("(root)", net)], Reader.context.is_readable, is_all=True, is_gradients=False)
    assert [one.name for one in found] == ["whole"]


class Marks:
    """A stand-in for the gauge that records each mark with the checksums that are published at that moment."""

    def __init__(self, hook):
        self.hook, self.seen = hook, []

    def set(self, value):
        self.seen.append((value, self.hook.metric("drift_checksum")))


def test_the_mark_is_taken_away_before_the_checksums_change(hook, group):
    hook.start("drift", every=EVERY)
    model = DistributedDataParallel(Net())
    train(model, 2 * EVERY)
    before = hook.metric("drift_checksum")
    hook.plugin("drift").mark = marks = Marks(hook)
    model.module.second.weight.data += 1
    train(model, EVERY)
    (taken_away, unchanged), (mark, changed) = marks.seen
    assert (taken_away, unchanged) == (0, before)
    assert mark > 0
    assert changed != before
