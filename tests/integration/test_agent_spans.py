"""Backward times alone, taken at probes on nodes of the graph in C, against those of the hooks on the graph, which are the specification."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookd import Plugin, hookimpl
from hookd.target.entry import hidden
from tests.integration.test_agent_graph import MODELS, Passing
from tests.support import emulated, sanitizers
from tests.support.agent import running

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SIZE = 1500
"""A product of two such matrices takes some hundred milliseconds, all else here less than one."""


class Back(Plugin):
    """Has backward passes added up."""

    name = "back"

    @hookimpl
    def configure(self, context):
        made = {
            name: context.counter(name, "Of backward.", ["module"]) for name in ("calls", "seconds", "self_seconds")
        }
        context.add_up(backward=True, **made)

    @hookimpl
    def select(self, module):
        return {"backward"}


def adding_up(clock: Callable[[], int] = time.perf_counter_ns) -> AbstractContextManager[Any]:
    """Start an agent that adds up each backward, however dear that is."""
    return running(Back, options={"every": "1"}, clock=clock)


def added(agent: Any, name: str) -> dict[str, float]:
    return {module: value for (module,), value in agent.values(f"hookd_back_{name}").items()}


def calls_of(make, *, learns: bool = False, twice: bool = False, mode: Any = nullcontext) -> dict[str, float]:
    torch.manual_seed(0)
    net = make()
    x = torch.randn(2, 4, requires_grad=learns) if "Transformer" not in repr(net) else torch.randn(1, 2, 4)
    with adding_up() as agent:
        for _ in range(3):
            with mode():
                loss = net(x).square().sum()
            loss.backward(retain_graph=twice)
            if twice:
                loss.backward()
        assert agent.state("back") == "active"
        assert not agent.parts.errors._failures
        own, whole = added(agent, "self_seconds"), added(agent, "seconds")
        assert all(0 <= own[one] <= whole[one] for one in own)
        return {module: calls for module, calls in added(agent, "calls").items() if calls}


@pytest.mark.parametrize(
    "how",
    [{}, {"learns": True}, {"twice": True}, {"mode": Passing}],
    ids=["", "the input learns", "twice", "under a mode"],
)
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "nests"]
)  # where each of three nodes counts in Python
def test_as_many_backward_passes_are_added_up_as_in_python(name, how, entry, monkeypatch) -> None:
    make = MODELS[name]
    in_c = calls_of(make, **how)
    monkeypatch.setenv("HOOKD_ENTRY", "0")
    assert in_c == calls_of(make, **how)


class Slow(nn.Module):
    """Does something slow; its subclasses say where."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(SIZE, SIZE))

    def slow(self, x):
        return x + (self.weight @ self.weight).sum() * 1e-9

    def forward(self, x):
        return self.slow(x)


class Between(Slow):
    def forward(self, x):
        return self.third(self.slow(self.second(self.first(x))))


class BeforeAndBeside(Slow):
    def forward(self, x):
        x = self.first(x)
        slow = self.slow(x)
        return self.third(self.second(x) + slow)


class AfterAndBeside(Slow):
    def forward(self, x):
        x = self.first(x)
        quick = self.second(x)
        return self.third(quick + self.slow(x))


class OfOneInput(Slow):
    def forward(self, x):
        x = self.first(x)
        other = x.relu()
        return self.third(self.slow(x)) + self.second(other)


class Nested(Slow):
    """Returns a container, so that it is hooked in Python."""

    def forward(self, x):
        x = self.slow(x)
        return {"x": x, "y": [x * 2]}


class Many(Slow):
    """Takes more tensors than are looked at in C."""

    def forward(self, x, *more):
        return self.slow(x)


class Around(nn.Module):
    """Calls a slow one first of all, and another one after it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = inner, nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x, *[x] * 4) if type(self.inner) is Many else self.inner(x)
        return self.after(y["x"] if type(y) is dict else y)


class Aside(nn.Module):
    """Calls a module with its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.quick = Slow(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.slow(x)
        self.aside = self.quick(y)
        return y


class Heads(nn.Module):
    """Returns the output of one of two heads; the other one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.slow, self.other, self.head = nn.Linear(4, 4), Slow(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.slow(self.body(x))
        self.other(x.relu())
        return self.head(x)


class Hidden(Heads):
    def forward(self, x):
        x = self.slow(self.body(x))
        self.other(x.detach().requires_grad_() * 1.0)  # noqa: FBT003
        return self.head(x)


KINDS = {
    "between": (Between, ""),
    "before and beside": (BeforeAndBeside, ""),
    "after and beside": (AfterAndBeside, ""),
    "of one input": (OfOneInput, ""),
    "between, inside": (lambda: nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4)), ".1"),
    "first, of a dict": (lambda: Around(Nested()), ".inner"),
    "first, of many": (lambda: Around(Many()), ".inner"),
    "first": (lambda: Around(Slow()), ".inner"),
    "aside": (Aside, ".slow"),
    "one head of two": (Heads, ".slow"),
    "a head that is not trained": (Hidden, ".slow"),
}


@emulated.lacks("time")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("either_way")
def test_time_is_that_of_the_module_that_takes_it(name) -> None:
    make, slow = KINDS[name]
    net = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
    with adding_up() as agent:
        for _ in range(3):
            y = net(torch.ones(2, 4))
            (y.sum() + (net[1].aside.sum() if name == "aside" else 0)).backward()
        own = added(agent, "self_seconds")
        assert own[f"1{slow}"] > 10 * sum(value for name, value in own.items() if name != f"1{slow}"), own
        assert sum(own.values()) == pytest.approx(added(agent, "seconds")["(root)"], rel=0.01)


@pytest.mark.parametrize("name", [name for name in MODELS if "reentrant" not in name and name != "nests"])
def test_own_times_add_up(name, entry) -> None:
    net = nn.Sequential(nn.Linear(4, 4), MODELS[name]())
    own, whole, shares = 0.0, 0.0, []
    with adding_up() as agent:
        for _ in range(8):
            x = torch.randn(2, 4) if name != "attention" else torch.randn(1, 2, 4)
            net(x).square().sum().backward()
            before = own, whole
            own, whole = sum(added(agent, "self_seconds").values()), added(agent, "seconds")["(root)"]
            shares.append((own - before[0]) / (whole - before[1]))
    # What is counted twice is so each time; a thread that is interrupted between two readings of the clock, once.
    assert min(shares) <= 1.01, shares


@pytest.mark.usefixtures("either_way")
def test_a_backward_to_some_of_the_weights_ends_with_it() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    with adding_up() as agent:
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            (got,) = torch.autograd.grad(net(torch.ones(2, 4)).sum(), [net[3].weight])
            assert got.shape == (4, 4)
        assert added(agent, "calls") == {"(root)": 5, "0": 3, "1": 3, "2": 3, "3": 5, "4": 5}


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


class Broken(nn.Module):
    """Goes backward until something raises, with modules around that."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.is_broken = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)), False

    def forward(self, x):
        for at, line in enumerate(self.lines):
            x = line(x)
            if at == 1 and self.is_broken:
                x = Raises.apply(x)
        return x


@pytest.mark.usefixtures("either_way")
def test_a_backward_that_raises_leaves_nothing_to_the_next_one() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Broken()))
    with adding_up() as agent:
        net(torch.ones(2, 4)).sum().backward()
        broken = net[1][1]
        for _ in range(3):
            broken.is_broken = True
            with pytest.raises(ZeroDivisionError):
                net(torch.ones(2, 4)).sum().backward()
            broken.is_broken = False
            net(torch.ones(2, 4)).sum().backward()
        calls = added(agent, "calls")
        assert calls["1.1"] == calls["1"] == calls["(root)"] == 4
        assert calls["1.1.lines.3.0"] == 7


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["", "in threads that end"])
def test_backwards_that_raise_again_and_again_leave_room_for_others(is_elsewhere, entry) -> None:
    net = broken = Broken()
    for _ in range(24):  # which are all open when it raises: there is room for 4,096
        net = nn.Sequential(nn.Linear(4, 4), net)
    raised = []

    def fails() -> None:
        try:
            net(torch.ones(2, 4)).sum().backward()
        except ZeroDivisionError:
            raised.append(1)

    with adding_up() as agent:
        net(torch.ones(2, 4)).sum().backward()
        broken.is_broken = True
        for _ in range(200):
            if is_elsewhere:
                thread = threading.Thread(target=fails)
                thread.start()
                thread.join()
            else:
                fails()
        broken.is_broken = False
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        calls = added(agent, "calls")
        assert agent.state("back") == "active", next(iter(agent.parts.registry)).last_error
    assert len(raised) == 200
    assert calls["1.1.0"] == calls["(root)"] == 4
    assert calls[f"{'1.' * 24}lines.3.0"] == 204


def test_a_thread_does_not_take_for_its_own_what_one_that_has_ended_has_marked(entry) -> None:
    net, other = (nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(2))

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()

    def evaluate() -> None:
        with torch.no_grad():
            other(torch.ones(2, 4))

    def elsewhere(function: Any) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    with adding_up() as agent:
        step()
        evaluate()
        for functions in [(step, evaluate), (step,), (step, evaluate, evaluate)]:
            for _ in range(20):
                for function in functions:
                    elsewhere(function)
                evaluate()
        calls = added(agent, "calls")
    assert calls["0"] == calls["1"] == calls["(root)"] == 61


class CutOff(nn.Module):
    """Gives back what its last module has made, where nothing of it takes any time but that module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).detach().requires_grad_() + 0)


def test_a_module_begins_no_later_than_the_one_inside_that_has_made_its_output(entry) -> None:
    net = CutOff()
    with adding_up() as agent:
        for _ in range(100):
            net(torch.ones(2, 4, requires_grad=True)).sum().backward()
        own, whole = added(agent, "self_seconds"), added(agent, "seconds")
    assert sum(own.values()) <= whole["(root)"] * 1.001


class Inner(nn.Module):
    """Goes backward inside of a backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lines = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x):
        return checkpoint(self.lines, x, use_reentrant=True)


def test_a_backward_inside_of_another_one_is_part_of_it(either_way) -> None:
    width = 512  # what the hooks themselves take is little beside the modules
    lines = [nn.Linear(width, width) for _ in range(4)]
    net = nn.Sequential(*lines[:2], Inner(width), *lines[2:])
    # Two hooks on one node in Python each ask for the time: another process may have the processor between them.
    clock = time.perf_counter_ns if either_way == "entry" else time.thread_time_ns
    with adding_up(clock) as agent:
        for _ in range(3):
            net(torch.ones(64, width)).sum().backward()
        assert set(added(agent, "calls").values()) == {3}
        own, whole = added(agent, "self_seconds"), added(agent, "seconds")
        assert all(0 <= own[one] <= whole[one] for one in own)
        assert sum(own.values()) <= whole["(root)"] * 1.01


def test_a_chain_of_modules_needs_one_mark_each(entry, monkeypatch) -> None:
    called, hooked = Counter(), hidden.hooked

    def counting(library):
        made = hooked(library)
        return lambda hook, *grads: (called.update([repr(hook).split('"')[1]]), made(hook, *grads))[1]

    monkeypatch.setattr(hidden, "hooked", counting)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)])
    with adding_up():
        for _ in range(2):
            called.clear()
            net(torch.ones(2, 4)).sum().backward()
    assert called == {"hookd": 4, "hookd probe": 12, "hookd end": 1}, (
        "its first module, and what that is in, are hooked as well"
    )


def test_a_graph_with_marks_may_outlive_hookd_and_meet_the_next_one(entry) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:hookd-entry")

    net, x, before = MODELS["a chain"](), torch.randn(2, 4), maps()
    with adding_up():
        for _ in range(2):
            first = net(x).sum()
    assert maps() > before
    with adding_up() as agent:
        net(x)
        second = net(x).sum()
        first.backward()
        assert set(added(agent, "calls").values()) <= {0}
        second.backward()
        assert set(added(agent, "calls").values()) == {1}
        del first, second
    gc.collect()
    assert maps() == before


def test_threads_have_their_own_times(entry) -> None:
    nets = [nn.Sequential(MODELS["two ways"](), *[nn.Linear(4, 4) for _ in range(3)]) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with adding_up() as agent:

            def train(net) -> None:
                for _ in range(30):
                    net(torch.ones(2, 4)).sum().backward()

            for net in nets:
                net(torch.ones(2, 4)).sum().backward()
            threads = [threading.Thread(target=train, args=(net,)) for net in nets]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            calls = added(agent, "calls")
            assert {value for name, value in calls.items() if name.count(".") < 2} == {31}
            assert not agent.parts.errors._failures
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.load
def test_marks_under_the_sanitizers(tmp_path) -> None:
    done = sanitizers.tested(tmp_path, __file__, "in_python or outlive or threads or raises or inside")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
