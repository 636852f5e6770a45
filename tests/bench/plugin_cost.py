"""What a plugin costs a training step: a ratio for each of three models, with and without it in turn.

    python tests/bench/plugin_cost.py [-p NAME[:key=value,...]]... [--model mlp] [--rounds N] [--steps N] [--warm N]

One process, one thread, blocks of steps in turn (A B A B ...): for A everything that hookd has replaced is put back.
CPU time of the thread per step (on a busy machine wall time says nothing), the mean of a block without its dearest
tenth; the ratio is the median over the rounds of B to the mean of the A before and the A after it. `control` is the
same of A to A. Before that the governor settles for `--warm` steps. Prints one JSON object per model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

import hookd
from hookd.agent import bootstrap


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(x).split(d, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(d), Attention(d, heads), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.relu, self.down = nn.ReLU(inplace=True), nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


def mlp():
    layers = [one for _ in range(100) for one in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 64), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3)


def charlm():
    model = nn.Sequential(nn.Embedding(256, 128), *(Block(128, 4) for _ in range(4)), nn.Linear(128, 256))
    return model, torch.randint(256, (8, 64)), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)


def convnet():
    body = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), *body, nn.Flatten(), nn.Linear(1024, 10))
    return model, torch.randn(32, 1, 16, 16), lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9)


MODELS = {"mlp": mlp, "charlm": charlm, "convnet": convnet}


class Job:
    """One training, with hookd in it or not."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.model, self.x, make_optimizer = make()
        self.optimizer = make_optimizer(self.model)

    def step_us(self, steps):
        """Train; gives the CPU time of a step, after two to settle."""
        times = []
        for _ in range(steps + 2):
            began = time.thread_time()
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            times.append(time.thread_time() - began)
        return statistics.fmean(sorted(times[2:])[: max(1, steps * 9 // 10)]) * 1e6


def measure(make, plugins, args):
    job = Job(make)
    hookd.start(plugins, run="bench", budget=args.budget)
    session = bootstrap._agent._session
    job.step_us(args.warm)
    session.disarm()
    plain, observed = [job.step_us(args.steps)], []
    for _ in range(args.rounds):
        session.arm()
        session.models.replan()
        observed.append(job.step_us(args.steps))
        session.disarm()
        plain.append(job.step_us(args.steps))
    intervals = {entry.name: entry.interval for entry in session.registry.entries.values()}
    hookd.stop()
    ratios = [b / ((plain[i] + plain[i + 1]) / 2) for i, b in enumerate(observed)]
    controls = [b / a for a, b in itertools.pairwise(plain)]
    return {
        "step_us": round(statistics.median(plain), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "control": round(statistics.median(controls), 3),
        "interval_steps": intervals,
    }


def spec(text):
    name, _, options = text.partition(":")
    return name, dict(option.split("=", 1) for option in options.split(",") if option)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-p", "--plugin", action="append", type=spec)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.01)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"python": platform.python_version(), "torch": torch.__version__, "plugins": args.plugin or [["nan", {}]]}
    for name in args.model or MODELS:
        found = measure(MODELS[name], args.plugin or ["nan"], args)
        print(json.dumps({"model": name, **found, **about}), flush=True)


if __name__ == "__main__":
    main()
