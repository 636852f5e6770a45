"""hookd_timing counts calls and wall time per module. The oracle is a ledger of what each module has really spent."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hookd_timing import Timing
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hookd import hookimpl

SPENT: Counter[str] = Counter()
"""Seconds by purpose."""


def spend(what: str, seconds: float = 0.01) -> None:
    began = time.perf_counter()
    time.sleep(seconds)  # stands for work: a machine under load may make it longer, and the ledger says by how much
    SPENT[what] += time.perf_counter() - began


class Spend(torch.autograd.Function):
    """Takes its time in each direction."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        spend(f"{what} forward")
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        spend(f"{ctx.what} backward")
        return grad, None


class Slow(nn.Module):
    def __init__(self, what="slow"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.what = what

    def forward(self, x):
        return Spend.apply(x, self.what) * self.weight


class Outer(nn.Module):
    """Spends time before, in and after its child."""

    def __init__(self):
        super().__init__()
        self.inner = Slow("inner")

    def forward(self, x):
        return Spend.apply(self.inner(Spend.apply(x, "outer")), "outer")


class Recursive(nn.Module):
    def forward(self, x, depth=2):
        x = Spend.apply(x, "recursive")
        return self(x, depth - 1) if depth else x


@pytest.fixture(autouse=True)
def _queue():
    SPENT.clear()


def net():
    return nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 1))


def train(model, steps, optimizer=None):
    """Return the wall time that it took."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return time.perf_counter() - began


def assert_holds(seconds: float, what: str, wall_s: float, times: float = 1.0) -> None:
    """Check that a time contains its share of the ledger, and nothing of the other shares, however slow the machine."""
    others = sum(SPENT.values()) - SPENT[what]
    assert times * SPENT[what] * 0.999 <= seconds <= times * (wall_s - others), (what, seconds, SPENT, wall_s)


def test_calls_are_counted_by_module(hook):
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    hook.start("timing")
    train(model, 3)
    assert hook.metric("timing_forward_calls") == {("0",): 3, ("1",): 6, ("2",): 3, ("(root)",): 3}


class WithBias(nn.Module):
    """Makes a bias or is given one, and returns it beside its own output, as T5's blocks do."""

    def __init__(self):
        super().__init__()
        self.fc, self.bias = nn.Linear(4, 4), nn.Embedding(3, 4)

    def forward(self, x, bias=None):
        bias = self.bias(torch.arange(3)) if bias is None else bias
        return self.fc(x) + bias, bias


def test_a_module_that_passes_a_tensor_through_goes_backward_once_per_call(hook):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(WithBias() for _ in range(3))

        def forward(self, x):
            bias = None
            for block in self.blocks:
                x, bias = block(x, bias)
            return x

    model = Net()
    hook.start("timing", every=1)
    train(model, 3)
    hook.stop()
    calls = hook.metric("timing_backward_calls")
    assert [calls[f"blocks.{at}",] for at in range(3)] == [3, 3, 3]


def test_forward_seconds_are_wall_time_with_children(hook):
    model = net()
    hook.start("timing")
    wall_s = train(model, 3)
    seconds = hook.metric("timing_forward_seconds")
    assert_holds(seconds["1",], "slow forward", wall_s)
    assert seconds["(root)",] >= sum(v for k, v in seconds.items() if k != ("(root)",))


def test_self_seconds_leave_out_the_children(hook):
    model = nn.Sequential(Outer(), Slow())
    hook.start("timing", every=1)
    wall_s = train(model, 3)
    hook.stop()
    for direction in ("forward", "backward"):
        total, own = (hook.metric(f"timing_{direction}_{kind}") for kind in ("seconds", "self_seconds"))
        assert_holds(own["0",], f"outer {direction}", wall_s)
        assert_holds(own["0.inner",], f"inner {direction}", wall_s)
        assert own["0",] == pytest.approx(total["0",] - total["0.inner",])
        assert sum(own.values()) == pytest.approx(total["(root)",])


def test_module_that_calls_itself_spends_its_own_time_once(hook):
    model = nn.Sequential(nn.Linear(4, 4), Recursive())
    hook.start("timing", every=1)
    wall_s = train(model, 2)
    hook.stop()
    assert hook.value("timing_forward_calls", "1") == 6
    assert_holds(hook.value("timing_forward_self_seconds", "1"), "recursive forward", wall_s)
    assert_holds(hook.value("timing_backward_self_seconds", "1"), "recursive backward", wall_s)


def test_call_that_raises_leaves_the_times_of_its_caller_right(hook):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow = Slow("inner")

        def forward(self, x):
            self.slow(x)
            raise ValueError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.raises, self.slow = Raises(), Slow()

        def forward(self, x):
            try:
                self.raises(x)
            except ValueError:
                spend("outer forward")
            return self.slow(x)

    hook.start("timing")
    wall_s = train(Catches(), 2)
    hook.stop()
    assert not hook.metric("timing_forward_calls").get(("raises",), 0)
    assert_holds(hook.value("timing_forward_self_seconds", "(root)"), "outer forward", wall_s)


def test_backward_seconds_stand_for_the_steps_that_were_not_sampled(hook):
    model = net()
    hook.start("timing")
    wall_s = train(model, 1)
    one_s = hook.value("timing_backward_seconds", "1") / 10
    assert_holds(one_s, "slow backward", wall_s)
    assert one_s <= hook.value("timing_backward_seconds", "(root)") / 10 * 1.01
    while not hook.listens("timing", "backward"):
        train(model, 1)  # not sampled
    assert hook.value("timing_backward_seconds", "1") == 10 * one_s
    assert hook.value("timing_backward_calls", "1") == 10
    SPENT.clear()
    wall_s = train(model, 1)
    more = hook.value("timing_backward_calls", "1") - 10
    assert 1 <= more <= 19, "until the next one is due, as far as the first did not represent them"
    assert_holds(hook.value("timing_backward_seconds", "1") - 10 * one_s, "slow backward", wall_s, times=more)


def test_every_step_is_sampled_on_demand(hook):
    model = net()
    hook.start("timing", every=1)
    wall_s = train(model, 3)
    assert_holds(hook.value("timing_backward_seconds", "1"), "slow backward", wall_s)
    assert hook.value("timing_backward_seconds", "1") <= hook.value("timing_backward_seconds", "(root)") * 1.01


def test_backward_that_comes_after_another_models_step_is_timed(hook):
    generator, critic = Slow("generator"), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, generator)]
    hook.start("timing", every=2)
    began = time.perf_counter()
    for _ in range(4):
        made = generator(torch.ones(2, 4, requires_grad=True))
        critic(made.detach()[:, :1]).mean().backward()
        optimizers[0].step()  # hookd's steps end here
        critic(made[:, :1]).mean().backward()
        optimizers[1].step()
    wall_s = time.perf_counter() - began
    assert hook.value("timing_backward_calls", "(root)") == 4
    seconds = hook.value("timing_backward_seconds", "(root)")
    assert 4 * 0.01 <= seconds <= 2 * (wall_s - SPENT["generator forward"])


def test_backward_of_a_computed_weight_belongs_to_its_module(hook):
    class Computed(nn.Module):
        def forward(self, weight):
            return Spend.apply(weight, "weight")

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    parametrize.register_parametrization(model[1], "weight", Computed())
    SPENT.clear()  # which calls it once
    hook.start("timing", every=1)
    wall_s = train(model, 2)
    assert_holds(hook.value("timing_backward_seconds", "1"), "weight backward", wall_s)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_is_apart_from_forward_and_backward(hook, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(Slow("first"), nn.Linear(4, 4))  # the end of the recompute is stopped early

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    hook.start("timing", every=1)
    model = Checkpointed()
    began = time.perf_counter()
    out = model(torch.randn(3, 4, requires_grad=True))
    first_s = SPENT["first forward"]
    out.sum().backward()
    wall_s = time.perf_counter() - began
    again_s = SPENT["first forward"] - first_s
    hook.stop()
    assert hook.value("timing_forward_calls", "block.0") == hook.value("timing_recompute_calls", "block.0") == 1
    assert hook.value("timing_recompute_calls", "block") == 1
    assert again_s <= hook.value("timing_recompute_seconds", "block") <= wall_s - first_s - SPENT["first backward"]
    assert sum(hook.metric("timing_recompute_self_seconds").values()) == pytest.approx(
        hook.value("timing_recompute_seconds", "block")
    )
    assert first_s <= hook.value("timing_forward_seconds", "block.0") <= wall_s - again_s - SPENT["first backward"]
    backward = hook.metric("timing_backward_seconds")
    assert SPENT["first backward"] <= backward["block.0",] <= wall_s - first_s - again_s
    assert backward["(root)",] <= wall_s - first_s - again_s


def test_evaluation_in_another_thread_is_no_phase_of_the_training(hook):
    model, other = nn.Linear(4, 1), Slow()
    hook.start("timing")
    train(model, 1)
    before = hook.value("timing_phase_seconds", "forward")
    thread = threading.Thread(target=other, args=(torch.ones(4),))
    thread.start()
    thread.join()
    assert hook.value("timing_phase_seconds", "forward") == before
    assert hook.value("timing_forward_calls", "#Slow.(root)") == 1


def test_model_that_is_gone_writes_into_no_other_series(hook):
    hook.start("timing", every=1)
    train(net(), 2)
    gc.collect()
    now_s = time.time()
    hook.tick(now_s)
    hook.tick(now_s + 100)  # after a while its series end, and their cells are free
    assert not hook.metric("timing_forward_calls")
    hook.context("timing").incident("test", "a new series")  # takes one of them, so that none becomes again what it was
    model = net()
    train(model, 3)
    names = [f"timing_{direction}_{kind}" for direction in ("forward", "backward") for kind in ("seconds", "calls")]
    before = [hook.metric(name) for name in names]
    hook.tick(now_s + 101)
    assert [hook.metric(name) for name in names] == before
    assert set(before[1].values()) == {3}


def test_own_time_goes_on_where_an_option_is_changed(hook):
    ends, trained = threading.Event(), threading.Event()

    class Leaving(Timing):
        """Lets go when the training has gone on with its heir, as where a change waits for a step."""

        @hookimpl
        def unconfigure(self):
            ends.set()
            assert trained.wait(60)

    hook.start(Leaving)
    model = net()
    train(model, 2)
    hook.tick()
    before = hook.metric("timing_forward_self_seconds")
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(hook.configure, "timing", every=5)
        assert ends.wait(60)
        train(model, 1)
        trained.set()
        assert changed.result() == {"every": "5"}
    hook.tick()
    after = hook.metric("timing_forward_self_seconds")
    assert set(after) == set(before)
    assert all(after[name] > before[name] for name in before), (before, after)


def test_in_place_modules_are_timed(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Slow(), nn.Linear(4, 1))
    hook.start("timing", every=1)
    train(model, 2)
    assert set(hook.metric("timing_backward_seconds")) == {("0",), ("1",), ("2",), ("3",), ("(root)",)}


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        train(model, 5, torch.optim.AdamW(model.parameters()))
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("timing", every=1)
    assert torch.equal(weights(), plain)
