"""Gradients of modules whose calls are counted in C: hooks on the graph in C must do the same as those in Python."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hookd import Plugin, Rate, hookimpl
from hookd.target.events import backward
from tests.support import sanitizers
from tests.support.agent import running


class Recorder(Plugin):
    """Records the gradients that it receives."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    @hookimpl
    def select(self, module):
        return {"backward_pre", "backward"}

    @hookimpl
    def backward_pre(self, module, grad_output):
        self.seen.append(("enters", module.name, *map(written, grad_output)))

    @hookimpl
    def backward(self, module, grad_input, grad_output):
        self.seen.append(("leaves", module.name, *map(written, grad_input), "of", *map(written, grad_output)))


def written(grad):
    return None if grad is None else (tuple(grad.shape), grad.flatten().tolist())


class TwoWays(nn.Module):
    """Uses its input in two branches, one of which works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.left(x) * self.right(x) + x


class Pair(nn.Module):
    """Takes two tensors, and returns two, one of them an input."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(4, 4, 4)

    def forward(self, x, bias, scale=1.0):
        return self.both(x, bias) * scale, bias


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre, self.one, self.two = nn.Linear(4, 4), Pair(), Pair()

    def forward(self, x):
        y, bias = self.one(x, self.pre(x))
        y, bias = self.two(y, bias, scale=2.0)
        return y + bias


class Split(nn.Module):
    """Returns two tensors of two nodes, and a dict."""

    def forward(self, x):
        return x.sin(), [x.cos()], {"x": x * 2}


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Split()

    def forward(self, x):
        one, (two,), three = self.split(x)
        return one * two + three["x"]


class Unbound(nn.Module):
    """Returns the outputs of one node, one of which is not used."""

    def forward(self, x):
        return x.unbind(1)


class Unbinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unbound = Unbound()

    def forward(self, x):
        one, _, two, _ = self.unbound(x)
        return one * two


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Deep(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x, depth: int = 2):
        return self(self.line(x), depth - 1) if depth else x.relu()


class Stopped(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return y if y.sum() > 1e9 else x.detach() + x


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)  # noqa: FBT003


MODELS = {
    "a chain": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4)),
    "two ways": lambda: nn.Sequential(nn.Linear(4, 4), TwoWays(), TwoWays()),
    "tuples": lambda: nn.Sequential(nn.Linear(4, 4), Pairs()),
    "nests": lambda: nn.Sequential(nn.Linear(4, 4), Splits()),
    "outputs of one node": lambda: nn.Sequential(nn.Linear(4, 4), Unbinds()),
    "nothing of its own": lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Dropout(0.0), nn.Flatten(0), nn.Identity()),
    "frozen": lambda: nn.Sequential(frozen(), nn.ReLU(), nn.Linear(4, 4), frozen()),
    "checkpoint": lambda: nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant=False), nn.Linear(4, 4)),
    "checkpoint, reentrant": lambda: nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant=True), nn.Linear(4, 4)),
    "calls itself": lambda: nn.Sequential(nn.Linear(4, 4), Deep()),
    "weights that are computed": lambda: nn.Sequential(nn.Linear(4, 4), normed(), normed()),
    "partly without a graph": lambda: nn.Sequential(nn.Linear(4, 4), Stopped()),
    "one module twice": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Embedding(3, 3), nn.Linear(4, 4))[:2],
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
}  # fmt: skip


def reported_of(make, *, learns: bool = False, twice: bool = False, mode: Any = nullcontext) -> tuple[list, list]:
    """Train for two steps; return the events that a plugin has received, and the gradients."""
    torch.manual_seed(0)
    net = make()
    x = torch.randn(2, 4, requires_grad=learns) if "Transformer" not in repr(net) else torch.randn(1, 2, 4)
    with running(Recorder) as agent:
        for _ in range(2):
            with mode():
                loss = net(x).square().sum()
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        assert agent.state("recorder") == "active", agent.parts.registry.named("recorder").last_error
        seen = agent.plugin("recorder").seen
    return seen, [written(p.grad) for p in net.parameters()]


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "how",
    [{}, {"learns": True}, {"twice": True}, {"mode": Passing}],
    ids=["", "the input learns", "twice", "under a mode"],
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_in_c_are_those_in_python(make, how, entry, monkeypatch) -> None:
    in_c = reported_of(make, **how)
    monkeypatch.setenv("HOOKD_ENTRY", "0")
    assert in_c == reported_of(make, **how)
    assert len(in_c[0]) >= 4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_walk_in_c_finds_what_one_in_python_does(make, entry, monkeypatch) -> None:
    walk, found = backward._Walk.__init__, []

    def both(self, outputs, entered, *, timed=False):
        assert backward.walk_in_c(outputs, entered.edges, entered.sequence, timed) is not None
        with monkeypatch.context() as without:
            without.setattr(backward, "walk_in_c", backward.no_walk)
            walk(self, outputs, entered, timed=timed)
        in_python = list(self.seen), [(one.node, one.places, one.inputs) for one in self.entries]
        walk(self, outputs, entered, timed=timed)
        found.append((list(self.seen), [(one.node, one.places, one.inputs) for one in self.entries]) == in_python)

    monkeypatch.setattr(backward._Walk, "__init__", both)
    reported_of(make, learns=True)
    assert found
    assert all(found)


def test_only_the_outermost_module_is_hooked_in_python(entry, monkeypatch) -> None:
    """This shows that the other tests here cover the hooks in C."""
    hooked, end = [], backward.end
    monkeypatch.setattr(
        backward, "end", lambda flow, *args, **kwargs: hooked.append(flow.module.name) or end(flow, *args, **kwargs)
    )
    with running(Recorder):
        for name in ("a chain", "two ways", "nothing of its own", "outputs of one node", "tuples"):
            net = MODELS[name]()
            net(torch.ones(2, 4)).sum().backward()  # hookd learns its modules
            hooked.clear()
            net(torch.ones(2, 4)).sum().backward()
            assert [one for one in hooked if not one.endswith("(root)")] == [], name


class Choosy(Recorder):
    longest = 1
    sampled: ClassVar = dict.fromkeys(("backward_pre", "backward"), Rate(unless_finite=True))


class Bad(torch.autograd.Function):
    """Puts a number into a gradient."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[-1] = ctx.number
        return grad, None


class Spoils(nn.Module):
    number = 1.0

    def forward(self, x):
        return Bad.apply(x, self.number)


@pytest.mark.parametrize("number", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [4, 1 << 15])
def test_finite_gradients_need_no_call(number, width, entry) -> None:
    net = nn.Sequential(nn.Tanh(), nn.Tanh(), Spoils(), nn.Tanh(), nn.Tanh())
    x = torch.ones(4, width, requires_grad=True)
    with running(Choosy) as agent:
        net(x).square().sum().backward()  # hookd learns its modules
        seen = agent.plugin("recorder").seen
        seen.clear()
        net[2].number = number
        net(x).square().sum().backward()
        inside = [
            (how, name) for how, name, *_ in seen if name not in {"(root)", "0"}
        ]  # the modules with hooks in Python: 0 gets a leaf
    if width > 4:
        assert len(inside) == 8  # nobody reads so many numbers
    else:
        assert inside == ([] if math.isfinite(number) else [("leaves", "2"), ("enters", "1"), ("leaves", "1")])


def test_who_looks_at_operations_sees_none_of_ours(either_way) -> None:
    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    def operations() -> list:
        seen.clear()
        for _ in range(2):
            net.zero_grad()
            loss = net(torch.ones(2, 4)).sum()
            with Noting():
                loss.backward()
        return seen.copy()

    net, seen = MODELS["two ways"](), []
    plain = operations()
    with running(Recorder):
        assert operations() == plain


def test_what_ends_a_backward_is_the_trainings_though_its_handler_is_gone(entry) -> None:
    class Ends(BaseException):
        pass

    def handler(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise Ends

    class Summed(Recorder):
        @hookimpl
        def backward(self, module, grad_input):
            pass

    before, added = signal.getsignal(signal.SIGUSR1), backward.added

    def interrupted(one, other):
        signal.signal(signal.SIGUSR1, handler)
        signal.raise_signal(signal.SIGUSR1)
        return added(one, other)

    net = MODELS["two ways"]()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward, "added", interrupted)
            with running(Summed):
                for _ in range(2):
                    with pytest.raises(Ends):
                        net(torch.ones(2, 4)).sum().backward()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_graph_may_outlive_hookd_and_meet_the_next_one(entry) -> None:
    net, x = MODELS["a chain"](), torch.randn(2, 4)
    with running(Recorder):
        first = net(x).sum()
    with running(Recorder) as agent:
        second = net(x).sum()
        first.backward()
        assert agent.plugin("recorder").seen == []
        second.backward()
        assert len(agent.plugin("recorder").seen) >= 8
        del first, second
    gc.collect()


def test_the_last_hook_of_a_graph_takes_the_code_with_it(entry) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:hookd-entry")

    net, before = MODELS["a chain"](), maps()
    with running(Recorder):
        for _ in range(2):
            loss = net(torch.ones(2, 4)).sum()
    assert maps() > before
    loss.backward()
    del loss
    gc.collect()
    assert maps() == before


@pytest.mark.load
def test_threads_may_go_through_one_graph_at_a_time(entry) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), TwoWays(), TwoWays(), TwoWays()), torch.randn(200, 4)
    parameters, interval = list(net.parameters()), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with running(Recorder) as agent:
            for _ in range(60):
                y = net(x).sum()

                def go_back(y=y) -> None:
                    for _ in range(4):
                        torch.autograd.grad(y, parameters, retain_graph=True)

                threads = [threading.Thread(target=go_back) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert not agent.parts.errors._failures
    finally:
        sys.setswitchinterval(interval)


def test_what_a_signal_handler_raises_in_a_hook_is_the_trainings(entry) -> None:
    class Slow(Recorder):
        @hookimpl
        def backward(self, module, grad_input):
            if module.leaf:
                signal.raise_signal(signal.SIGUSR1)

    def handler(*_):
        raise ZeroDivisionError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with running(Slow) as agent:
            with pytest.raises(ZeroDivisionError):
                MODELS["a chain"]()(torch.ones(2, 4)).sum().backward()
            assert agent.parts.registry.named("recorder").errors == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_threads_have_their_own(entry) -> None:
    nets = [MODELS["two ways"]() for _ in range(4)]
    with running(Recorder) as agent:

        def train(net) -> None:
            for _ in range(10):
                net(torch.ones(2, 4)).sum().backward()

        threads = [threading.Thread(target=train, args=(net,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = agent.plugin("recorder").seen
        assert {name.partition(".")[0] for _, name, *_ in seen}
        assert agent.state("recorder") == "active"


@pytest.mark.load
def test_hooks_under_the_sanitizers(tmp_path) -> None:
    done = sanitizers.tested(tmp_path, __file__, "in_python or python_does or no_call or outlive or signal or threads")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
