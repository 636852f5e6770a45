"""The effect of an attach on the training of models with 10,000 and 100,000 modules.

    python -m tests.bench --only scale

A process that knows nothing of hookd trains; `hookd attach` reaches it from outside, with the default observers. The
results are the time until its metrics name the first modules, the time until all modules are observed, and the steps: the
median, the largest of as many steps before the attach (the control), and the largest between the attach and the moment when
the model was learnt. Steps in which all gradients of a sample are read belong to observing, not to the attach;
so `learning` is the CPU time of the agent's own functions, in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.target.boot import bootstrap
from tests.bench import deep, fresh
from tests.bench.tables import Bound, Report, Table
from tests.support.environment import bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "A large model"
STEPS = 8
LEARNING = {10_000: 30, 100_000: 10}
"""Numbers of modules, and over how many steps their learning is measured."""
PAUSE_MS = 50
TIMES = ("median", "control", "largest", "first_s", "learnt_s", "detach_s")
M_MXFAST, DEFAULT_MXFAST = 1, 128  # malloc.h and malloc.c of glibc 2.36


def measure(modules: int, steps: int) -> dict[str, float]:
    """Attach to one training; return times in s."""
    with tempfile.TemporaryDirectory(prefix="hookd-scale-") as home:
        file = Path(home, "steps")
        command = [bare_python(), deep.__file__, str(modules), file]
        with Process(command, env=target_environment(), stdin=True) as training:
            training.expect("^ready$", timeout_s=600)
            wait_until(lambda: len(_ends(file)) > steps, 600, what="steps before the attach")
            begun = time.monotonic()
            attachment = Attachment([training.pid])
            try:
                first_s = _when(attachment, begun, lambda metrics: metrics.select("hookd_timing_forward_calls_total"))
                learnt_s = _when(attachment, begun, _is_learnt)
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
        "modules": modules, "first_s": first_s, "learnt_s": learnt_s, "detach_s": detach_s,
        "median": statistics.median(before), "control": max(before), "largest": max(during),
    }  # fmt: skip


def learning_s(modules: int, steps: int) -> list[float]:
    """Return the CPU time that learning took in each step, with an agent in this process that started as by an attach.

    Memory that the training itself has freed does not count; see `no_fastbins`.
    """
    model = deep.deep(modules)
    training = deep.train(model)
    next(training)
    specs = [{"name": name, "options": {}, "by_name": True} for name in ("nan", "timing", "activations", "learning")]
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
        models = bootstrap._agent.parts.models
        models.learn_on, models._plan_for = timed(models.learn_on), timed(models._plan_for)
        models.coverage.update = timed(models.coverage.update)
        with no_fastbins():
            for _ in range(steps):
                next(training)
                spent.append(0.0)
    finally:
        bootstrap.stop()
    return spent[:-1]


@contextlib.contextmanager
def no_fastbins() -> Iterator[None]:
    """Make glibc merge small chunks as they are freed.

    By default it keeps them and merges all of them at the next larger allocation, whoever makes it
    (`malloc_consolidate`). After a step of 100,000 modules that takes 30 ms and more, which hit the agent as often as
    the training: 37 to 57 ms of the agent's time in a step against 1 to 19 without.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MXFAST, 0)
    try:
        yield
    finally:
        libc.mallopt(M_MXFAST, DEFAULT_MXFAST)


def _when(attachment: Attachment, begun: float, condition: Any) -> float:
    wait_until(lambda: condition(attachment.metrics()), 900, what="its metrics")
    return time.monotonic() - begun


def _is_learnt(metrics: Any) -> bool:
    """Return whether all is observed that is to be observed: 512 modules of a model of more than 2,048."""
    return metrics.total("hookd_modules", state="observed") >= 512


def _ends(file: Path) -> list[float]:
    return [int(line) / 1e9 for line in file.read_text().splitlines()[:-1]] if file.exists() else []


def report(*, quick: bool = False) -> Report:
    """Measure both sizes."""
    sizes = (10_000,) if quick else (10_000, 100_000)
    found = [measure(modules, 4 if quick else STEPS) for modules in sizes]
    learning = {modules: max(fresh.run(learning_s, modules, LEARNING[modules])) for modules in sizes}
    rows = [
        [f"{one['modules']:,}", *(f"{one[of]:.2f}" for of in TIMES), f"{1e3 * learning[one['modules']]:.0f}"]
        for one in found
    ]
    columns = ["modules", "a step, s", "the longest of as many before", "the longest while learning", "first metrics, s",
               "all learnt, s", "detach, s", "learning, at most ms of a step"]  # fmt: skip
    return Report([Table("A training to which hookd attaches", columns, rows)],
                  [Bound(f"{n:,} modules: ms that learning takes of a step", PAUSE_MS, 1e3 * s) for n, s in learning.items()])  # fmt: skip
