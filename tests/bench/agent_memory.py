"""Memory that the agent takes in the target.

    python -m tests.bench --only agent_memory
    python -m tests.bench.agent_memory [--modules N] [--steps N]

`resident`: a process that has torch, and the modules of the standard library that the agent imports, trains a model. Then
the agent starts with the default observers, and 22 steps follow, at least two of them sampled. The result is the growth
of the resident set, including the page of the metrics, after a collection and a `malloc_trim`; the control is the
growth over as many steps before. `growth`: resident set and Python objects, over the steps of a small model with
all observing plugins.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys

import psutil
import torch
from torch import nn

from tests.bench import deep
from tests.bench.tables import Bound, Report, Table

TITLE = "Memory of the agent"
STDLIB = (
    "dataclasses", "difflib", "fcntl", "hashlib", "importlib.metadata", "inspect", "json", "mmap", "queue", "selectors",
    "socket", "statistics", "struct", "traceback", "zlib",
)  # fmt: skip
DEFAULT = ("nan", "timing", "activations", "learning")
OBSERVERS = (*DEFAULT, "memory", "optimizer", "coverage")
STEPS = 22


def resident(modules: int) -> dict[str, float]:
    """Return the growth of this process in MiB: without the agent (control), and with it."""
    for name in STDLIB:
        __import__(name)
    training = deep.train(deep.deep(modules))
    _go(training, STEPS // 2)
    at = [_resident()]
    _go(training, STEPS)
    at.append(_resident())
    import hookd  # noqa: PLC0415 - its memory is measured

    hookd.start(list(DEFAULT), run="bench")
    _go(training, STEPS)
    at.append(_resident())
    hookd.stop()
    return {"modules": modules, "control": (at[1] - at[0]) / 2**20, "agent": (at[2] - at[1]) / 2**20}


def growth(steps: int) -> dict[str, float]:
    """Return the growth of a training's resident set in MiB, and of its objects, after the first tenth of the steps."""
    import hookd  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4, 4)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    hookd.start(list(OBSERVERS), run="bench")
    train(steps // 10)
    page = _page()  # before the resident set, because asking takes memory
    before = _resident() - page, len(gc.get_objects())
    train(steps - steps // 10)
    page = _page()
    after = _resident() - page, len(gc.get_objects())
    hookd.stop()
    grown = (after[0] - before[0]) / 2**20
    return {"steps": steps, "grown": grown, "objects": after[1] - before[1], "page": page / 2**20}


def _go(training: object, steps: int) -> None:
    for _ in range(steps):
        next(training)  # type: ignore[call-overload]


def _page() -> int:
    """Return the resident part of the metrics page: its size is fixed, and it fills with the latest records of all kinds."""
    return sum(one.rss for one in psutil.Process().memory_maps() if "hookd-page" in one.path)


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def apart(what: str, count: int) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.agent_memory", f"--{what}", str(count), "--here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(*, quick: bool = False) -> Report:
    """Measure models of several sizes, and many steps."""
    sizes = (10, 2_000) if quick else (10, 2_000, 10_000)
    models = [apart("modules", count) for count in sizes]
    steps = apart("steps", 10_000 if quick else 100_000)
    rows = [[f"{one['modules']:,.0f}", f"{one['agent']:.1f}", f"{one['control']:.1f}"] for one in models]
    over = [f"{steps['steps']:,.0f}", f"{steps['grown']:.2f}", f"{steps['objects']:+,.0f}", f"{steps['page']:.1f}"]
    tables = [Table("MiB of the target beyond torch and the standard library", ["modules", "agent", "control"], rows),
              Table("What has grown over the steps", ["steps", "MiB", "objects of Python", "MiB of the page at the end"], [over])]  # fmt: skip
    return Report(tables, bounds(models[-1], steps))


def bounds(model: dict[str, float], steps: dict[str, float]) -> list[Bound]:
    """Compare with the promised bounds."""
    return [Bound(f"MiB of the agent, {model['modules']:,.0f} modules", 15, model["agent"] - abs(model["control"])),
            Bound("MiB that it has grown by over the steps", 1, steps["grown"]),
            Bound("objects that there are more after the steps", 500, steps["objects"])]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process, for a caller that has started it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.here:
        print(json.dumps([apart("modules", arguments.modules or 10_000), apart("steps", arguments.steps or 100_000)]))
    elif arguments.modules:
        print(json.dumps(resident(arguments.modules)))
    else:
        print(json.dumps(growth(arguments.steps)))


if __name__ == "__main__":
    main()
