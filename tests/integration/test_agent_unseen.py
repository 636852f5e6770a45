"""Code of the training that watches torch itself sees nothing of hookd: modes, tensor classes, FLOP counts, swaps."""

from __future__ import annotations

import contextlib
import cProfile
import gc
import pstats
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookd_nan
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hookd
from hookd import Plugin, hookimpl
from tests.support.agent import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OBSERVERS = [
    ("nan", {"every": 1}), ("timing", {"every": 1}), ("activations", {"every": 1, "parameters": True}),
    ("memory", {}), ("optimizer", {}), ("coverage", {}), ("capture", {"directory": tempfile.gettempdir()}),
]  # fmt: skip
CALLS: Counter[str] = Counter()


def note(kind: str, function: Any) -> None:
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    CALLS[f"{kind} {getattr(function, '__qualname__', function)} {owner}"] += 1


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        note("function", func)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        note("operation", func)
        return func(*args, **(kwargs or {}))


class Telling(torch.Tensor):
    """A tensor whose class notes every operation on it, even reading an attribute."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        note("class", func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Odd(nn.Module):
    """Has what observers look at: in-place operations, several outputs, attention, recurrence, an input passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.attention, self.rnn = nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 8)
        self.end, self.never = nn.Sigmoid(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.act(self.norm(self.fc(x)))[None]
        z, _ = self.attention(y, y, y)
        w, _ = self.rnn(z)
        return {"x": x, "out": self.end(w)}


def trained(make_input: Callable[[], torch.Tensor], mode: Any = None) -> Counter[str]:
    """Train a few steps inside a mode; return the operations that were noted."""
    torch.manual_seed(0)
    net = Odd()
    optimizer = torch.optim.AdamW(net.parameters())
    CALLS.clear()
    with mode if mode is not None else contextlib.nullcontext():
        for _ in range(4):
            optimizer.zero_grad()
            net(make_input())["out"].sum().backward()
            optimizer.step()
    return Counter(CALLS)


@contextlib.contextmanager
def observed() -> Iterator[None]:
    hookd.start(OBSERVERS)
    try:
        yield
    finally:
        hookd.stop()


def plain_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def telling_input() -> torch.Tensor:
    return plain_input().as_subclass(Telling)


@pytest.mark.parametrize(
    ("make_input", "mode"),
    [(plain_input, Functions), (plain_input, Operations), (telling_input, None)],
    ids=["function mode", "dispatch mode", "tensor class"],
)
def test_what_watches_torch_sees_the_same_calls(make_input: Callable[[], torch.Tensor], mode: type[Any] | None) -> None:
    expected = trained(make_input, mode() if mode else None)
    with observed():
        assert trained(make_input, mode() if mode else None) == expected
    assert expected


def test_flops_are_counted_as_without() -> None:
    plain, with_hookd = FlopCounterMode(display=False), FlopCounterMode(display=False)
    trained(plain_input, plain)
    with observed():
        trained(plain_input, with_hookd)
    assert with_hookd.get_flop_counts() == plain.get_flop_counts()
    assert plain.get_total_flops() > 0


class Itself(nn.Module):
    """Returns its parameter, and a view of it."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4), requires_grad=trains)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.w, self.w.t()


class Swapped(nn.Module):
    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.table, self.fc, self.end = Itself(trains=trains), nn.Linear(4, 4), nn.Sigmoid()

    def forward(self) -> torch.Tensor:
        w, t = self.table()
        return self.end(self.fc(w.to(self.fc.weight.dtype)) + t.to(self.fc.weight.dtype))


class OfGradients(Plugin):
    """Listens to the gradients of parameters, for which each of them has a hook."""

    name = "of_gradients"

    @hookimpl
    def configure(self, context: hookd.Context) -> None:
        self.seen: list[str] = []

    @hookimpl
    def param_grad(self, name: str) -> None:
        self.seen.append(name)


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def step(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    net().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("trains", [True, False])
def test_parameters_that_a_module_returned_can_be_swapped(trains: bool) -> None:
    net = Swapped(trains=trains)
    with observed():
        for _ in range(3):
            step(net)
            net.double()
            step(net)
            net.float()
    assert net.table.w.dtype is torch.float32


@pytest.mark.usefixtures("swapping")
def test_parameters_whose_gradients_are_listened_to_can_be_swapped() -> None:
    net = Swapped(trains=True)
    with running(OfGradients) as agent:
        step(net)
        net.double()
        step(net)
        assert "table.w" in agent.plugin("of_gradients").seen


class Buffered(nn.Module):
    """Returns a buffer, and hands one to a module that returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.end = nn.Linear(4, 4), nn.Softmax(-1)
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.end(self.fc(self.end(self.table))), self.table


class UsesBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Buffered()

    def forward(self) -> torch.Tensor:
        y, table = self.inner()
        return y + table


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("trains", [True, False])
def test_buffers_that_a_module_was_given_or_returned_can_be_swapped(trains: bool) -> None:
    net = UsesBuffers()
    with observed():
        for _ in range(3):
            if trains:
                step(net)
            else:
                with torch.no_grad():
                    net()
            net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert net.inner.table[0, 0] == 4


@pytest.mark.usefixtures("swapping")
def test_a_buffer_that_a_model_returns_can_be_swapped() -> None:
    net = Buffered()
    with observed(), torch.no_grad():
        for _ in range(3):
            net()
            net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    assert net.table[0, 0] == 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


BESIDE = {"is_dynamo_compiling"}
"""What hookd asks by this function of torch's, torch.compile must see."""


def called() -> tuple[Counter[str], set[str]]:
    """Train under cProfile: how often each function was called by the training, and the names of hookd's."""
    torch.manual_seed(0)
    model, profile = nn.Sequential(nn.Linear(4, 4), Doubling(), nn.ReLU(), nn.Dropout()), cProfile.Profile()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    data = torch.utils.data.DataLoader(torch.linspace(-1, 1, 16).reshape(4, 4), batch_size=2)

    def step(batch: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    profile.enable(), profile.disable()  # the first calls of all fill torch's caches
    for _ in range(3):
        profile.enable()
        model.train()
        for batch in data:
            step(batch)
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 4))
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 5))
        profile.disable()
    places = (str(Path(hookd.__file__).parent), str(Path(hookd_nan.__file__).parent.parent / "hookd_"), "<hookd")
    calls, ours = Counter[str](), set[str]()
    for (file, _, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file.startswith(places):
            ours.add(name)
        elif file != "~" and name not in BESIDE:
            calls[f"{Path(file).name} {name}"] += count
    return calls, ours


@pytest.mark.usefixtures("entry")
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason="3.11 is the first to hide functions, and from 3.12 on cProfile sees all threads",
)
def test_a_profile_of_the_training_has_one_function_of_hookds_and_all_of_its_own() -> None:
    gc.disable()  # whose callbacks, such as hypothesis', come at any moment
    try:
        called()
        plain, _ = called()
        with running("nan", "timing", "activations", options={"every": 1}, budget=100.0):
            seen, ours = called()
    finally:
        gc.enable()
    assert ours == {"hookd", "train"}, "and what stands in the place of nn.Module.train"
    assert seen == plain


def modules_of_profile() -> Counter[str]:
    """Train under torch's profiler: how often it has seen each module called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(with_stack=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    todo, seen = list(profile.profiler.kineto_results.experimental_event_tree()), Counter[str]()
    while todo:
        event = todo.pop()
        seen[event.name] += 1
        todo += event.children
    return Counter({name: count for name, count in seen.items() if name.startswith("nn.Module:")})


@pytest.mark.usefixtures("entry")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="CPython 3.11 is the first to hide functions from a profiler")
@pytest.mark.skipif(
    sys.version_info >= (3, 13) and torch.__version__ < "2.7", reason="torch 2.6 crashes there, without hookd too"
)
def test_torchs_profiler_sees_the_modules_that_are_called() -> None:
    plain = modules_of_profile()
    with running("nan", "timing", "activations", options={"every": 1}, budget=100.0):
        assert modules_of_profile() == plain
    with running("timing"):
        assert modules_of_profile() == plain
    assert plain.total() == 18
