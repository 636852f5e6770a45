"""What an attach does to the training of a model of 10,000 and of 100,000 modules.

    python -m tests.bench.scale [--modules N]... [--steps N]

A process that knows nothing of hookd trains; `hookd attach` reaches it from outside, with the default observers. Told
are the time until its metrics name the first modules, the time until all that is to be observed is, and the steps: the
median, the largest of as many steps before the attach (the control), and the largest from the attach on until the model
was learnt. Steps in which all of the gradients of a sample are looked at are part of the observing, not of the attach;
so the pause of the plans is that of the agent's own account, see `table`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from hookd.agent import bootstrap
from tests.bench import deep
from tests.support.environment import bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment


def measure(modules: int, steps: int) -> dict[str, Any]:
    """Attach to one training; times in s."""
    with tempfile.TemporaryDirectory(prefix="hookd-scale-") as home:
        file = Path(home, "steps")
        command = [bare_python(), deep.__file__, str(modules), file]
        with Process(command, env=target_environment(), stdin=True) as training:
            training.expect("^ready$", timeout_s=600)
            wait_until(lambda: len(_ends(file)) > steps, 600, what="steps before the attach")
            resident = psutil.Process(training.pid).memory_info().rss
            begun = time.monotonic()
            attachment = Attachment([training.pid])
            try:
                first_s = _when(attachment, begun, lambda metrics: metrics.select("hookd_timing_forward_calls_total"))
                learnt_s = _when(attachment, begun, _is_learnt)
                grown = psutil.Process(training.pid).memory_info().rss - resident
                states = {s.labels["state"]: s.value for s in attachment.metrics().select("hookd_modules")}
                ended = time.monotonic()
                attachment.detach()
                detach_s = time.monotonic() - ended
            finally:
                attachment.process.close()
            ends = _ends(file)
            training.send("")
            training.wait()
    before = [b - a for a, b in itertools.pairwise(one for one in ends if one <= begun)]
    during = [b - a for a, b in itertools.pairwise(ends) if b > begun and a < begun + learnt_s]
    return {
        "modules": modules, "first_s": first_s, "learnt_s": learnt_s, "detach_s": detach_s, "grown": grown / 2**20,
        "observed": states.get("observed"), "left_out": states.get("left_out"),
        "median": statistics.median(before), "control": max(before), "largest": max(during), "during": during,
    }  # fmt: skip


def learning_s(modules: int, steps: int) -> list[float]:
    """Give the CPU time that learning took in each step, with an agent in this process that came as by an attach."""
    model = deep.deep(modules)
    training = deep.train(model)
    next(training)
    specs = [{"name": name, "options": {}, "by_name": True} for name in ("nan", "timing", "activations")]
    bootstrap.start({"method": "attach", "plugins": specs, "lease_s": None})
    spent = [0.0]

    def timed(work: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            begun = time.thread_time()
            try:
                return work(*args, **named)
            finally:
                spent[-1] += time.thread_time() - begun

        return run

    try:
        models = bootstrap._agent._session.models
        models.learn_on, models._plan_for = timed(models.learn_on), timed(models._plan_for)
        models.seen.look = timed(models.seen.look)
        for _ in range(steps):
            next(training)
            spent.append(0.0)
    finally:
        bootstrap.stop()
    return spent[:-1]


def _when(attachment: Attachment, begun: float, condition: Any) -> float:
    wait_until(lambda: condition(attachment.metrics()), 900, what="its metrics")
    return time.monotonic() - begun


def _is_learnt(metrics: Any) -> bool:
    """Whether all that is to be observed is: 512 modules of a model of more than 2,048."""
    return metrics.total("hookd_modules", state="observed") >= 512


def _ends(file: Path) -> list[float]:
    return [int(line) / 1e9 for line in file.read_text().splitlines()[:-1]] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, action="append")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    for modules in arguments.modules or (10_000, 100_000):
        print(
            {
                k: [round(x, 2) for x in v] if isinstance(v, list) else round(v, 3)
                for k, v in measure(modules, arguments.steps).items()
            },
            flush=True,
        )


if __name__ == "__main__":
    main()
