"""What one call of a small module costs: plain, with torch's no-op global hooks, unselected, and with timing listening.

    python tests/bench/hot_path.py [--rounds N] [--calls N]

One process, one thread, the variants in turn (A B C A B C ...), thread CPU time, medians over the rounds. Prints one
JSON object: ns per call of each variant, and what each adds to the plain call of its own round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hookd.agent import bootstrap
from hookd.agent.patch import SKIP


class Caller(nn.Module):
    """Calls its child many times, so that the child is called inside a model as in training."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.calls = calls

    def forward(self, x):
        child, clock = self.child, time.thread_time_ns
        started = clock()
        for _ in range(self.calls):
            child(x)
        return (clock() - started) / self.calls


def torch_hooks():
    return [register_module_forward_pre_hook(lambda *_: None), register_module_forward_hook(lambda *_: None)]


def measure(calls: int, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    net, x = Caller(calls), torch.zeros(1)
    timing = {"name": "timing", "entry": "hookd_timing:Timing", "options": {}, "by_name": True}
    bootstrap.start({"method": "start", "plugins": [timing], "lease_s": None})
    session = bootstrap._agent._session
    net(x)
    models = session.models
    plan, ours, original = models.plans[id(net.child)], models.patch.ours, models.patch.original
    session.namespace["backward_on"] = False  # nine steps in ten: backward is sampled

    def run(call, child_plan, hooks=()) -> float:
        nn.Module.__call__, models.plans[id(net.child)] = call, child_plan
        handles = [handle for make in hooks for handle in make()]
        try:
            return net(x)
        finally:
            for handle in handles:
                handle.remove()

    variants = {
        "plain": lambda: run(original, plan),
        "torch_hooks": lambda: run(original, plan, [torch_hooks]),
        "unselected": lambda: run(ours, SKIP),
        "timing": lambda: run(ours, plan),
        "plain_again": lambda: run(original, plan),
    }
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            figures[name].append(variant())
    nn.Module.__call__ = ours
    bootstrap.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    figures = measure(args.calls, args.rounds)
    plain = figures["plain"]
    added = {name: [a - b for a, b in zip(values, plain, strict=False)] for name, values in figures.items()}
    median = statistics.median
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ns": {name: round(median(values), 1) for name, values in figures.items()},
                "added_ns": {name: round(median(values), 1) for name, values in added.items()},
                "unselected_over_plain": round(
                    median(a / b for a, b in zip(figures["unselected"], plain, strict=False)), 3
                ),
                "timing_over_torch_hooks": round(
                    median(a / b for a, b in zip(added["timing"], added["torch_hooks"], strict=False)), 3
                ),
                "control": round(median(a / b for a, b in zip(figures["plain_again"], plain, strict=False)), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
