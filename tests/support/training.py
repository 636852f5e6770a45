"""Training processes that know nothing of hookd, and the facts in their output."""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support import forked
from tests.support.environment import REPORTS, REPOSITORY, TARGETS, WORKLOADS, bare_python, once, target_environment
from tests.support.processes import PATIENCE_S, Process

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A training script with its arguments.

    Attributes:
        script: a file of tests/targets, of tests/e2e/reports with `reports/` before its name, or of the shared workloads
            with `workloads/`.
        arguments: what decides the result; not --pause, which only gives time to attach.
        ranks: processes that torchrun starts, each by way of tests/targets/settled.py; 0 for a plain process.
        has_libraries: whether it imports more than torch, from the environment of the tests.
    """

    script: str
    arguments: str = ""
    ranks: int = 0
    has_libraries: bool = False

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{self.script.removesuffix('.py')} {self.arguments}").strip("-")

    @property
    def path(self) -> Path:
        kind, _, name = self.script.rpartition("/")
        return {"": TARGETS, "workloads": WORKLOADS, "reports": REPORTS}[kind] / name

    def command(self, *more: str) -> list[str | Path]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        python = sys.executable if self.has_libraries else bare_python()
        return [
            python,
            *([*torchrun, TARGETS / "settled.py"] if self.ranks else []),
            self.path,
            *self.arguments.split(),
            *more,
        ]


def environment(**extra: str | Path) -> dict[str, str]:
    """Return the environment of a training process; what inductor compiled once serves the whole test run."""
    return target_environment(TORCHINDUCTOR_CACHE_DIR=_compiled().name, **extra)


@once
def _compiled() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inductor-")


STEP = '        print(f"step {step} loss {loss.item():.4f}", flush=True)\n'


def paced_example(directory: Path) -> Path:
    """Write a copy of `examples/train.py` that sleeps in each step, so that it leaves the processor to the tests."""
    text = (REPOSITORY / "examples" / "train.py").read_text()
    assert text.count(STEP) == 1
    path = directory / "train.py"
    path.write_text(text.replace(STEP, STEP + "        __import__('time').sleep(0.12)\n"))
    return path


def start(job: Job, *more: str, **extra: str | Path) -> Process:
    return Process(job.command(*more), env=environment(**extra), cwd=job.path.parent)


def start_warm(job: Job, *more: str, **extra: str | Path) -> Process:
    """Start a job where torch has been imported, in a fork; one of several ranks, that compiles, or that imports more, as any other."""
    if job.ranks or job.has_libraries or "compile" in str(job):
        return start(job, *more, **extra)
    return Process(job.command(*more), env=environment(**extra), cwd=job.path.parent, popen=forked.start)


@functools.cache
def plain_run(job: Job) -> Future[tuple[str, ...]]:
    """Begin to run a job without hookd, once per test run, beside whatever the test does meanwhile."""
    return _beside.submit(_run_plainly, job)


def plain_result(job: Job) -> tuple[str, ...]:
    """Return the lines of a job without hookd, see `result`."""
    return plain_run(job).result()


def _run_plainly(job: Job) -> tuple[str, ...]:
    with start_warm(job) as process:
        return result(process.finish(4 * PATIENCE_S))


_beside = ThreadPoolExecutor(1)


def result(lines: list[str]) -> tuple[str, ...]:
    """Pick what must be the same with and without hookd: every loss, every compiled graph and the closing checksum."""
    kept = tuple(line for line in lines if re.match(r"step \d+ loss|graphs \d+|done [0-9a-f]{64}$", line))
    assert kept, f"no result in {lines}"
    assert kept[-1].startswith("done "), f"no checksum in {kept[-3:]}"
    return kept


@functools.cache
def called_modules(script: str, arguments: str = "") -> frozenset[str]:
    """Return the names of all modules that a script calls, found with torch's own hooks in a run of a few steps."""
    job = Job(script, f"{arguments} --steps 2")
    command = [bare_python(), TARGETS / "who_is_called.py", job.path, *job.arguments.split()]
    with Process(command, env=environment(), popen=forked.start) as process:
        return frozenset(json.loads(process.finish()[-1]))
