"""The cost of one call of a small module, piece by piece: the patch, dispatch, each plugin, a backward.

    python -m tests.bench.hot_path [--pairs N] [--calls N] [--piece NAME]...

One process, one thread, blocks of calls alternate without and with the piece (A B B A, `hookd/testing/pairs.py`), CPU time
of the thread. All pieces take turns, five times over: a processor that changes its clock rate changes ratios as well, and
must affect all pieces alike. A call is of an `nn.Identity` inside another module; with a backward, of an `nn.Linear(8, 8)`
and its backward; for a compiled model, of the model. `between` is a step that is not sampled: nine in ten, or more.
Prints one JSON object: ns per call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd import Plugin, hookimpl
from hookd.testing.pairs import PAIRS, Pairs, alternate, enough
from tests.bench import tools, workloads
from tests.bench.attached import Attached
from tests.bench.tables import Bound, Report, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

TITLE = "What a call costs, piece by piece"
CALLS = 1000
ROUNDS = 5
NEVER = 1_000_000
"""An interval longer than this bench runs."""


# -- the models that are called


class Caller(nn.Module):
    """Calls its child many times, so that the child is called inside a model as in training."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.child, self.calls, self.x = nn.Identity(), calls, torch.ones(1)

    def forward(self):
        child, x, clock = self.child, self.x, time.thread_time_ns
        began = clock()
        for _ in range(self.calls):
            child(x)
        return (clock() - began) / self.calls


class Chain(nn.Module):
    """Calls its child on the output of the previous call; a call is one forward and its share of the backward."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.child, self.calls, self.x = nn.Linear(8, 8), calls // 10, torch.zeros(4, 8, requires_grad=True)

    def forward(self, x):
        for _ in range(self.calls):
            x = self.child(x)
        return x

    def timed(self):
        began = time.thread_time_ns()
        self(self.x).sum().backward()
        return (time.thread_time_ns() - began) / self.calls


class Compiled:
    """A model that was compiled before the attach: once a step, its call goes through dynamo's guards."""

    def __init__(self, calls: int) -> None:
        self.model = torch.compile(nn.Sequential(nn.Identity(), nn.ReLU()), backend="eager")
        self.calls, self.x = calls // 4, torch.ones(1)
        self.model(self.x)

    def timed(self):
        model, x, clock = self.model, self.x, time.thread_time_ns
        began = clock()
        for _ in range(self.calls):
            model(x)
        return (clock() - began) / self.calls


# -- the pieces around the call


class Listening(Plugin):
    """Listens to each call, and does nothing."""

    def __init__(self, number: int) -> None:
        self.name = f"noop{number}"

    @hookimpl
    def forward_pre(self, module: Any) -> None:
        """Listen only."""

    @hookimpl
    def forward(self, module: Any) -> None:
        """Listen only."""


class Receiving(Plugin):
    """Receives the output of each call, as plugins do that look at tensors: with gradients off and modes disabled."""

    name = "receiving"

    @hookimpl
    def forward(self, module: Any, output: Any) -> None:
        """Listen only."""


def _hookd(*plugins: object, more: Sequence[Plugin] = ()) -> Any:
    """Attach to the models that are called, and go on to a step that is neither the first nor metered."""

    @contextlib.contextmanager
    def opened(called: Callable[[], float]) -> Iterator[Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        with Attached(plugins, more=more) as attached:
            called()
            optimizer.step()
            attached.leave()
            yield attached.on

    return opened


def _around(make: Callable[[], AbstractContextManager[object]]) -> Any:
    @contextlib.contextmanager
    def opened(_called: object) -> Iterator[Any]:
        yield make

    return opened


@contextlib.contextmanager
def _passing_through() -> Iterator[None]:
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextlib.contextmanager
def _full_backward_hooks() -> Iterator[None]:
    handle = nn.modules.module.register_module_full_backward_hook(tools.no_op)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Piece:
    name: str
    opened: Any
    called: Any = Caller

    def measure(self, pairs: int, calls: int) -> Pairs:
        target = self.called(calls)
        timed = getattr(target, "timed", target)
        timed()
        with self.opened(timed) as switched:
            return alternate(timed, switched, pairs, timed)


THROUGH, TORCH, NOBODY = (
    "a function in its place that calls through",
    "torch's global hooks, no-op",
    "attached, nobody listening",
)
TIMING = "timing, between"
PIECES = [
    Piece(THROUGH, _around(_passing_through)),
    Piece(TORCH, _around(tools.forward_hooks)),
    Piece(NOBODY, _hookd()),
    *(Piece(f"{n} no-op plugin{'s' * (n > 1)}", _hookd(more=[Listening(i) for i in range(n)])) for n in (1, 4, 8)),
    Piece("1 no-op plugin that is handed the output", _hookd(more=[Receiving()])),
    Piece(TIMING, _hookd(("timing", {"every": NEVER}))),
    Piece("timing, sampled", _hookd(("timing", {"every": 1}))),
    Piece("nan, between", _hookd(("nan", {"every": NEVER}))),
    Piece("nan, sampled", _hookd(("nan", {"every": 1}))),
    Piece("activations, between", _hookd(("activations", {"every": NEVER}))),
    Piece("activations, sampled (8 statistics)", _hookd(("activations", {"every": 1}))),
    Piece("backward: torch's global hooks, no-op", _around(tools.forward_hooks), Chain),
    Piece("backward: torch's full backward hooks, no-op", _around(_full_backward_hooks), Chain),
    Piece("backward: attached, nobody listening", _hookd(), Chain),
    Piece("backward: timing, between", _hookd(("timing", {"every": NEVER})), Chain),
    Piece("backward: timing, sampled", _hookd(("timing", {"every": 1})), Chain),
    Piece("backward: nan, sampled, gradients too", _hookd("nan"), Chain),
    Piece("compiled: torch's global hooks, no-op", _around(tools.forward_hooks), Compiled),
    Piece("compiled: attached, nobody listening", _hookd(), Compiled),
    Piece("compiled: timing, sampled", _hookd(("timing", {"every": 1})), Compiled),
    Piece("compiled: nan, sampled", _hookd(("nan", {"every": 1})), Compiled),
]  # fmt: skip


def measure(pieces: Sequence[Piece], pairs: int, calls: int) -> dict[str, Pairs]:
    workloads.steady()
    warnings.filterwarnings(
        "ignore", "Using `torch.compile", UserWarning
    )  # hooks fire once more for its wrapper: they may
    found = {piece.name: Pairs() for piece in pieces}
    in_a_round = 2 * math.ceil(pairs / ROUNDS / 2)  # `alternate` makes two at a time
    for _ in range(ROUNDS):
        for piece in pieces:
            found[piece.name] += piece.measure(in_a_round, calls)
            torch._dynamo.reset()
    return found


def report(*, quick: bool = False) -> Report:
    """Measure all pieces."""
    found = measure(PIECES, 20 if quick else PAIRS, CALLS // 4 if quick else CALLS)
    rows = [[name, *_figures(pairs)] for name, pairs in found.items()]
    columns = ["piece", "plain call, ns", "added, ns", "95 % bounds", "middle half", "ratio", "A/A control"]
    return Report([Table("A call, without and with", columns, rows)], bounds(found))


def bounds(found: dict[str, Pairs]) -> list[Bound]:
    """Compare with the promised bounds."""
    over_torch = (found[TIMING].ratio.value - 1) / (found[TORCH].ratio.value - 1)
    return [
        Bound("a call of an unselected module, to an unpatched one", 1.25, found[NOBODY].ratio.value),
        Bound("what timing adds, as a share of what torch's own hooks add", 0.7, over_torch),
    ]


def _figures(pairs: Pairs) -> list[str]:
    added, ratio, control = pairs.added, pairs.ratio, pairs.control
    plain = statistics.median(pairs.plain)
    return [f"{plain:,.0f}", f"{added.value:,.0f}", f"{added.low:,.0f} to {added.high:,.0f}",
            "{:,.0f} to {:,.0f}".format(*added.quarters), f"{ratio.value:.3f}",
            f"{control.value:.3f} ({control.low:.3f} to {control.high:.3f})"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=enough, default=PAIRS)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--piece", action="append", default=[], choices=[piece.name for piece in PIECES])
    args = parser.parse_args()
    chosen = [piece for piece in PIECES if not args.piece or piece.name in args.piece]
    found = measure(chosen, args.pairs, args.calls)
    figures = {name: {"added_ns": pairs.added.value, "ratio": pairs.ratio.value, "control": pairs.control.value}
               for name, pairs in found.items()}  # fmt: skip
    print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "pieces": figures}))


if __name__ == "__main__":
    main()
