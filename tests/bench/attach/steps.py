"""The largest step of a training around an attach, beside the largest in as long a time without one.

    python -m tests.bench.attach.steps [--rounds N] [--python TEXT]

Each round has three windows of the same training: one without anything (the control), one from just before an attach
until half a second after it, one around the detach. A step is between two ends that the training notes in shared
memory, so that its output cannot hold it up. Prints one JSON object, times in ms.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import statistics
import time
from typing import TYPE_CHECKING

from hookd.attach import AttachRequest, attach, detach
from hookd.config import PluginSpec
from tests.bench.attach.training import Training
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Sequence

PLUGINS = tuple(PluginSpec(name, {}, by_name=True) for name in ("nan", "timing", "activations"))
AFTER_S = 0.5
"""The first observed steps belong to an attach: plans are made in them."""


def measure(training: Training, rounds: int) -> dict[str, object]:
    windows: dict[str, list[tuple[int, int]]] = {"control": [], "attach": [], "detach": []}
    results = []
    pid = training.process.pid
    length_s = 1.0
    for _ in range(rounds):
        windows["control"].append(_window(lambda: None, length_s))
        begun = time.monotonic()
        windows["attach"].append(_window(lambda: results.append(attach(pid, AttachRequest(plugins=PLUGINS))), AFTER_S))
        length_s = time.monotonic() - begun
        windows["detach"].append(_window(lambda: detach(pid), AFTER_S))
    ends = training.ends()
    steps = [(after - before) / 1e6 for before, after in itertools.pairwise(ends)]
    largest = {name: sorted(_largest(ends, one) for one in found) for name, found in windows.items()}
    return {
        "rounds": rounds,
        "median_step": round(statistics.median(steps), 2),
        **{name: _spread(values) for name, values in largest.items()},
        "stop": _spread(sorted(1e3 * one.pause_s for one in results)),
        "wall": _spread(sorted(1e3 * one.wall_s for one in results)),
        "wrong": training.wrong,
    }


def _window(act, then_s: float) -> tuple[int, int]:
    begun = time.monotonic_ns()
    act()
    time.sleep(then_s)
    return begun, time.monotonic_ns()


def _largest(ends: Sequence[int], window: tuple[int, int]) -> float:
    """Give the largest step that lies in a window, if only in part."""
    first, last = bisect.bisect_left(ends, window[0]), bisect.bisect_left(ends, window[1])
    return max(ends[n] - ends[n - 1] for n in range(max(first, 1), min(last + 1, len(ends)))) / 1e6


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), 3), "p95": round(values[int(0.95 * len(values))], 3),
        "max": round(values[-1], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--python", default="", help="only those whose description contains this")
    arguments = parser.parse_args()
    for python in interpreters.found():
        if python.torch and arguments.python in str(python):
            with Training(python) as training:
                print(json.dumps({"python": str(python), **measure(training, arguments.rounds)}), flush=True)


if __name__ == "__main__":
    main()
