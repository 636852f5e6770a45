"""What hookd_timing says of each module, beside torch.profiler and beside the autograd nodes timed by hand.

    python tests/bench/timing_oracle.py [--rounds N]

One process, one thread; in each round the same step runs under hookd, under the profiler and under hooks on all nodes, in
turn, and a module's figure is the least over all of them: what it takes when nobody disturbs it. Nodes belong to the calls during which they were made, by
their sequence numbers. Prints one JSON object: for each model and oracle the median and the largest relative error over
the modules that take at least 1 % of the step, and how many those are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

import hookd
from hookd.agent import bootstrap
from hookd.page import PageReader

ACCUMULATE = 1 << 63
SHARE = 0.01
STEPS = 5
Times = dict[str, float]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


def transformer():
    net = nn.Sequential(nn.Embedding(100, 256), *(Block(256) for _ in range(2)), nn.Linear(256, 100))
    return net, torch.randint(0, 100, (4, 64))


def convnet():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), *(Residual(32) for _ in range(2)), nn.Flatten(1), nn.Linear(32 * 900, 10))
    return net, torch.randn(8, 3, 32, 32)


class Calls:
    """The module calls of one step, by their range of sequence numbers: from torch's own hooks, without hookd."""

    def __init__(self, net: nn.Module) -> None:
        self.names = {id(module): name or "(root)" for name, module in net.named_modules()}
        self.ranges: list[tuple[int, int, str]] = []
        self._open: list[tuple[int, object]] = []

    def __enter__(self):
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()

    def _before(self, module, _args):
        mark = record_function("hookd:" + self.names[id(module)])
        mark.__enter__()
        self._open.append((torch._C._autograd._get_sequence_nr(), mark))

    def _after(self, module, _args, _output):
        first, mark = self._open.pop()
        mark.__exit__(None, None, None)
        self.ranges.append((first, torch._C._autograd._get_sequence_nr(), self.names[id(module)]))

    def totals(self, nodes: list[tuple[int, float]]) -> Times:
        """Give each module the time of the nodes that were made in its calls."""
        times: defaultdict[str, float] = defaultdict(float)
        for number, seconds in nodes:
            for first, end, name in self.ranges:
                if first <= number < end:
                    times[name] += seconds
        return times


def step(net: nn.Module, x: torch.Tensor, before_backward=lambda _loss: None) -> None:
    net.zero_grad()
    loss = net(x).square().mean()
    before_backward(loss)
    loss.backward()


def under_profiler(net: nn.Module, x: torch.Tensor) -> tuple[Times, Times]:
    with Calls(net) as calls, profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(net, x)
    forward: defaultdict[str, float] = defaultdict(float)
    nodes = []
    for event in profiler.events():
        if event.name.startswith("hookd:"):
            forward[event.name.removeprefix("hookd:")] += event.time_range.elapsed_us() / 1e6
        elif event.name.startswith("autograd::engine::evaluate_function") and 0 <= event.sequence_nr < ACCUMULATE:
            nodes.append((event.sequence_nr, event.time_range.elapsed_us() / 1e6))
    return forward, calls.totals(nodes)


def by_hand(net: nn.Module, x: torch.Tensor) -> Times:
    nodes: list[tuple[int, float]] = []

    def hook_all(loss):
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node not in seen and node._sequence_nr() < ACCUMULATE:
                seen.add(node)
                todo += [following for following, _ in node.next_functions if following is not None]
                hook(node, node._sequence_nr())

    def hook(node, number):
        began = []
        node.register_prehook(lambda _grads: began.append(time.perf_counter()))
        node.register_hook(lambda _in, _out: nodes.append((number, time.perf_counter() - began.pop())))

    with Calls(net) as calls:
        step(net, x, hook_all)
    return calls.totals(nodes)


class Hookd:
    """hookd_timing in this process, asked what one step has added."""

    def __enter__(self):
        hookd.start([("timing", {"every": 1})], run="oracle", budget=100.0)
        self.reader = PageReader(os.dup(bootstrap._agent._page.fd))
        return self

    def __exit__(self, *_):
        self.reader.close()
        hookd.stop()

    def seconds(self, direction: str) -> Times:
        name = f"hookd_timing_{direction}_seconds"
        family = next(family for family in self.reader.read().families if family.name == name)
        return {series.values[0]: series.cells[0] for series in family.series}


def under_hookd(net: nn.Module, x: torch.Tensor) -> list[tuple[Times, Times]]:
    with Hookd() as page:
        step(net, x)  # learns the model
        read = [(page.seconds("forward"), page.seconds("backward"))]
        for _ in range(STEPS):
            step(net, x)
            read.append((page.seconds("forward"), page.seconds("backward")))
    return [(_less(f1, f0), _less(b1, b0)) for (f0, b0), (f1, b1) in itertools.pairwise(read)]


def _less(now: Times, then: Times) -> Times:
    return {name: now[name] - then[name] for name in now}


def errors(ours: list[Times], theirs: list[Times], whole_s: float) -> dict[str, float]:
    least = {name: min(one[name] for one in theirs) for name in theirs[0]}
    large = [name for name, seconds in least.items() if seconds >= SHARE * whole_s]
    found = [abs(min(one[name] for one in ours) / least[name] - 1) for name in large]
    return {"modules": len(large), "median": round(statistics.median(found), 4), "largest": round(max(found), 4)}


def compare(make, rounds: int) -> dict[str, dict[str, float]]:
    net, x = make()
    for _ in range(3):
        step(net, x)
    ours, profiled, hand, whole = [], [], [], []
    for _ in range(rounds):
        ours += under_hookd(net, x)
        for _ in range(STEPS):
            profiled.append(under_profiler(net, x))
            hand.append(by_hand(net, x))
            began = time.perf_counter()
            step(net, x)
            whole.append(time.perf_counter() - began)
    whole_s = min(whole)
    pairs = {
        "forward_profiler": (0, [one[0] for one in profiled]),
        "backward_profiler": (1, [one[1] for one in profiled]),
        "backward_by_hand": (1, hand),
    }
    return {name: errors([one[at] for one in ours], theirs, whole_s) for name, (at, theirs) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {make.__name__: compare(make, arguments.rounds) for make in (transformer, convnet)}
    print(json.dumps({"torch": torch.__version__, **models}))


if __name__ == "__main__":
    main()
