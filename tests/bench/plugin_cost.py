"""The overhead of a plugin: the ratio of a training step with and without it, for each workload.

    python -m tests.bench.plugin_cost [-p NAME[:key=value,...]]... [--model mlp] [--pairs N] [--steps N] [--warm N]

Like `side_by_side.py`, for any plugins and options. First the governor settles, for at most `--warm` steps. A block of
`--steps` should be as long as the longest sampling interval. Prints one JSON object per workload.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import asdict

import torch

from hookd.testing.pairs import PAIRS, alternate, enough
from tests.bench import workloads
from tests.bench.attached import Attached


def measure(workload: str, plugins: list[object], args: argparse.Namespace) -> dict[str, object]:
    job = workloads.Job(workload)
    with Attached(plugins, budget=args.budget) as attached:
        attached.settle(job.step, args.warm)
        attached.leave()
        pairs = alternate(lambda: job.block(args.steps), attached.on, args.pairs, job.step)
        intervals = attached.intervals()
    figures = {"median": pairs.ratio, "mean": pairs.mean, "control": pairs.control}
    about = {"step_us": statistics.median(pairs.plain) / 1e3, "interval_steps": intervals}
    return about | {name: asdict(one) for name, one in figures.items()}


def spec(text: str) -> tuple[str, dict[str, str]]:
    name, _, options = text.partition(":")
    return name, dict(option.split("=", 1) for option in options.split(",") if option)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-p", "--plugin", action="append", type=spec)
    parser.add_argument("--model", action="append", choices=workloads.WORKLOADS)
    parser.add_argument("--pairs", type=enough, default=PAIRS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=500)
    parser.add_argument("--budget", type=float, default=0.01)
    args = parser.parse_args()
    workloads.steady()
    plugins = args.plugin or ["nan"]
    about = {"python": platform.python_version(), "torch": torch.__version__, "plugins": plugins}
    for name in args.model or workloads.available():
        print(json.dumps({"model": name, **measure(name, plugins, args), **about}), flush=True)


if __name__ == "__main__":
    main()
