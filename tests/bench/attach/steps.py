"""The largest step of a training around an attach, beside the largest in as long a time without one.

    python -m tests.bench.attach.steps [--rounds N] [--depth N] [--python TEXT]

Each round has three windows of the same training: one without anything (the control), one as long from just before an
attach until two seconds after it, one around the detach. A step lies between two ends that the training notes in shared
memory, so that its output cannot hold it up; the time in which it waited for a processor is left out, for other processes
had that. Prints one JSON object, times in ms.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import time
from typing import TYPE_CHECKING

from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.config import PluginSpec
from tests.bench.attach.training import Training
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.bench.attach.training import Step

PLUGINS = tuple(PluginSpec(name, {}, by_name=True) for name in ("nan", "timing", "activations", "learning"))
AFTER_S = 2.0
"""The first observed steps belong to an attach: plans are made in them."""


def shape(depth: int) -> tuple[str, ...]:
    """Return the trainer's arguments for this number of pairs of inner layers."""
    return () if depth == 1 else ("--depth", str(depth), "--width", "16")


def measure(training: Training, rounds: int, after_s: float = AFTER_S) -> dict[str, object]:
    windows: dict[str, list[tuple[int, int]]] = {"control": [], "attach": [], "detach": []}
    results = []
    pid = training.process.pid
    length_s = after_s / 2 + after_s
    for _ in range(rounds):
        windows["control"].append(_window(lambda: None, length_s))
        begun = time.monotonic()
        windows["attach"].append(_window(lambda: results.append(attach(pid, AttachRequest(plugins=PLUGINS))), after_s))
        length_s = time.monotonic() - begun
        windows["detach"].append(_window(lambda: detach(pid), after_s / 2))
    taken = training.taken()
    found = {name: sorted(largest(taken, one) for one in ones) for name, ones in windows.items()}
    return {
        "rounds": rounds,
        "median_step": round(median(taken), 2),
        **{name: spread(values) for name, values in found.items()},
        "stop": spread(sorted(1e3 * one.pause_s for one in results)),
        "wall": spread(sorted(1e3 * one.wall_s for one in results)),
        "wrong": training.wrong,
    }


def _window(act: Callable[[], object], then_s: float) -> tuple[int, int]:
    begun = time.monotonic_ns()
    act()
    time.sleep(then_s)
    return begun, time.monotonic_ns()


def median(taken: Sequence[Step]) -> float:
    """Return the median length of steps, in ms."""
    return statistics.median(step.length for step in taken) / 1e6


def largest(taken: Sequence[Step], window: tuple[int, int]) -> float:
    """Return the length of the longest step that lies in a window, if only in part, in ms."""
    first, last = (bisect.bisect_left(taken, at, key=lambda step: step.end) for at in window)
    return max(step.length for step in taken[first : last + 1]) / 1e6


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the middle and the upper end of sorted values."""
    return {
        "p50": round(statistics.median(values), 3), "p95": round(values[int(0.95 * len(values))], 3),
        "max": round(values[-1], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--depth", type=int, default=1, help="so many pairs of inner layers, of width 16 beyond 1")
    parser.add_argument("--python", default="", help="only those whose description contains this")
    arguments = parser.parse_args()
    for python in interpreters.found():
        if python.torch and arguments.python in str(python):
            with Training(python, *shape(arguments.depth)) as training:
                print(json.dumps({"python": str(python), **measure(training, arguments.rounds)}), flush=True)


if __name__ == "__main__":
    main()
