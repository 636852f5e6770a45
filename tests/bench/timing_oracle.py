"""The times that hookd_timing reports for each module, compared with torch.profiler and with autograd nodes timed by hand.

    python -m tests.bench.timing_oracle [--rounds N]

One process, one thread. hookd samples every other step. The oracles look at the step after it, which hookd ignores
(`apart`): so a slowdown that hookd causes in what it times would show. Nodes are timed by hand in sampled steps as well
(`same`: one execution, timed twice); the profiler is not used there, because it counts hookd's hooks as part of the node.
Nodes belong to the calls during which they were made, by their sequence numbers; the accumulation into `.grad` belongs
to none. `self` is the time that belongs to a call and to no call inside it.

A module's error is the median over the rounds of the ratio of two figures taken one after the other, because a shared
machine may be slower by half for a while. Prints one JSON object: for each model and pair
of figures, the median and the largest error over the modules that take at least 1 % of the step, and how many those are.
`control` compares figures that should be equal: nodes timed by hand in one round and in the next.

malloc is set to keep its memory (`tests/bench/workloads.py`); otherwise the same convolution takes 2 or 3 ms, depending
on earlier allocations of anybody, even of an oracle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

import hookd
from hookd.target.boot import bootstrap
from hookd.wire.page import PageReader
from tests.bench import workloads
from tests.bench.tables import Bound, Report, Table

TITLE = "Times of modules, beside two oracles"
ACCUMULATE = 1 << 63
SHARE = 0.01
ROUNDS = 40
Times = dict[str, float]
Figures = dict[str, Times]
"""Seconds by module, of each kind."""
KINDS = ("forward", "forward_self", "backward", "backward_self")
EVERY = 2
MARK = "hookd:"


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


def mlp():
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(128, 512)


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
        self.made: dict[object, int] = {}  # the nodes and their numbers
        self.on_node = None
        self._open: list[tuple[int, object]] = []

    def __enter__(self):
        self._handles = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()

    def _before(self, module, _args):
        mark = record_function(MARK + self.names[id(module)])
        mark.__enter__()
        self._open.append((torch._C._autograd._get_sequence_nr(), mark))

    def _after(self, module, _args, output):
        first, mark = self._open.pop()
        mark.__exit__(None, None, None)
        self.ranges.append((first, torch._C._autograd._get_sequence_nr(), self.names[id(module)]))
        for node in _nodes(output.grad_fn, first) if self.on_node else ():
            if node not in self.made:
                self.made[node] = node._sequence_nr()
                self.on_node(node, node._sequence_nr())

    def figures(self, nodes: list[tuple[int, float]]) -> Figures:
        """Return for each module the time of the nodes that were made in its calls."""
        total: defaultdict[str, float] = defaultdict(float)
        own: defaultdict[str, float] = defaultdict(float)
        for number, seconds in nodes:
            around = [(first, name) for first, end, name in self.ranges if first <= number < end]
            for _, name in around:
                total[name] += seconds
            if around:
                own[self._innermost(around)] += seconds
        return {"backward": total, "backward_self": own}

    def _innermost(self, around: list[tuple[int, str]]) -> str:
        # Calls that begin with the same node are in the order of their ends: the inner ones before the outer.
        last = max(first for first, _ in around)
        return next(name for first, name in around if first == last)


def _nodes(root, first: int) -> set:
    """Return the nodes from `root` down to the number `first`."""
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen and first <= node._sequence_nr() < ACCUMULATE:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return seen


class Training:
    def __init__(self, make) -> None:
        self.net, self.x = make()
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

    def step(self, before_backward=lambda _loss: None) -> None:
        self._optimizer.zero_grad()
        loss = self.net(self.x).square().mean()
        before_backward(loss)
        loss.backward()
        self._optimizer.step()

    def under_profiler(self) -> Figures:
        with Calls(self.net) as calls, profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        total: defaultdict[str, float] = defaultdict(float)
        own: defaultdict[str, float] = defaultdict(float)
        nodes = []
        for event in profiler.events():
            seconds = event.time_range.elapsed_us() / 1e6
            if event.name.startswith(MARK):
                total[event.name.removeprefix(MARK)] += seconds
                own[event.name.removeprefix(MARK)] += seconds
                around = event.cpu_parent
                if around is not None and around.name.startswith(MARK):
                    own[around.name.removeprefix(MARK)] -= seconds
            elif event.name.startswith("autograd::engine::evaluate_function") and 0 <= event.sequence_nr < ACCUMULATE:
                nodes.append((event.sequence_nr, seconds))
        return {"forward": total, "forward_self": own, **calls.figures(nodes)}

    def by_hand(self) -> Figures:
        """Time each node between the hooks of others on it: the last before it, the first after it."""
        began: dict[int, float] = {}
        nodes: list[tuple[int, float]] = []

        def hook_after(node, number):
            node.register_hook(lambda *_: nodes.append((number, time.perf_counter() - began[number])))

        def hook_before(_loss):
            for node, number in calls.made.items():
                node.register_prehook(lambda _grads, number=number: began.update({number: time.perf_counter()}))
            calls.made.clear()

        with Calls(self.net) as calls:
            calls.on_node = hook_after
            self.step(hook_before)
        return calls.figures(nodes)

    def alone(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


class Hookd:
    """hookd_timing in this process; it reports what a step has added."""

    def __enter__(self):
        hookd.start([("timing", {"every": EVERY})], run="oracle", budget=100.0)
        self.reader = PageReader(os.dup(bootstrap._agent._page.fd))
        return self

    def __exit__(self, *_):
        self.reader.close()
        hookd.stop()

    def sampled(self, turn) -> tuple[Figures, Any]:
        """Take a turn in a sampled step; return hookd's figures and the result of the turn."""
        before = self._seconds()
        said = turn()
        after = self._seconds()
        weights = {kind: 1 if kind.startswith("forward") else EVERY for kind in KINDS}
        return {
            kind: {name: (now - before[kind][name]) / weights[kind] for name, now in after[kind].items()}
            for kind in KINDS
        }, said

    @staticmethod
    def _publish() -> None:
        """Publish the modules' own time now, as the plugin does once a second in hookd's own thread."""
        bootstrap._agent.parts.registry.named("timing").plugin.tick()

    def _seconds(self) -> Figures:
        self._publish()
        families = {family.name: family for family in self.reader.read().families}
        return {
            kind: {one.values[0]: one.cells[0] for one in families[f"hookd_timing_{kind}_seconds"].series}
            for kind in KINDS
        }


class Comparison:
    """Rounds of one model, as pairs of hookd's and the oracle's figures."""

    def __init__(self, make) -> None:
        self._training = Training(make)
        self._pairs: dict[str, list[tuple[Figures, Figures]]] = {"profiler_apart": [], "by_hand_apart": [],
                                                                 "by_hand_same": []}  # fmt: skip
        self._alone: list[float] = []

    def run(self, rounds: int) -> None:
        training, pairs = self._training, self._pairs
        with Hookd() as page:
            for _ in range(2 * EVERY):
                training.step()
            for _ in range(rounds):
                ours, _ = page.sampled(training.alone)
                pairs["profiler_apart"].append((ours, training.under_profiler()))
                ours, _ = page.sampled(training.alone)
                pairs["by_hand_apart"].append((ours, training.by_hand()))
                pairs["by_hand_same"].append(page.sampled(training.by_hand))
                self._alone.append(training.alone())

    def results(self) -> dict[str, dict[str, float]]:
        found = {
            f"{kind}_{name}": self._errors([(ours[kind], theirs[kind]) for ours, theirs in pairs])
            for name, pairs in self._pairs.items()
            for kind in pairs[0][1]
        }
        hand = [theirs["backward"] for _, theirs in self._pairs["by_hand_apart"]]
        return {**found, "control": self._errors(list(zip(hand[::2], hand[1::2], strict=False)))}

    def _errors(self, pairs: list[tuple[Times, Times]]) -> dict[str, float]:
        median, whole_s = statistics.median, min(self._alone)
        large = [name for name in pairs[0][1] if median(theirs[name] for _, theirs in pairs) >= SHARE * whole_s]
        ratios = {name: median(ours[name] / theirs[name] for ours, theirs in pairs) for name in large}
        return _summary(ratios)


def _summary(ratios: Times) -> dict[str, float]:
    errors = [abs(ratio - 1) for ratio in ratios.values()]
    return {"modules": len(errors), "median": round(statistics.median(errors), 4), "largest": round(max(errors), 4)}


def compare(make, rounds: int) -> dict[str, dict[str, float]]:
    one = Comparison(make)
    one.run(rounds)
    return one.results()


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Compare on all models."""
    workloads.steady()
    torch.manual_seed(0)
    return {make.__name__: compare(make, rounds) for make in (mlp, transformer, convnet)}


def report(*, quick: bool = False) -> Report:
    """Compare, and report the differences."""
    models = measure(4 if quick else ROUNDS)
    rows = [[model, pair.replace("_", " "), str(one["modules"]), f"{one['median']:.1%}", f"{one['largest']:.1%}"]
            for model, pairs in models.items() for pair, one in pairs.items()]  # fmt: skip
    columns = ["model", "figures", "modules", "median error", "largest error"]
    promised = [Bound(f"{model}: {pair.replace('_', ' ')}", 0.10, one["median"])
                for model, pairs in models.items() for pair, one in pairs.items() if pair != "control"]  # fmt: skip
    return Report([Table("Modules that take 1 % of a step or more", columns, rows)], promised)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    print(json.dumps({"torch": torch.__version__, **measure(arguments.rounds)}))


if __name__ == "__main__":
    main()
