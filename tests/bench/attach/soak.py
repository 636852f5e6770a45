"""Attach again and again to busy and hostile processes on every Python that is found; count the failures.

    python -m tests.bench.attach.soak [--injections N] [--cycles M] [--python TEXT]

An injection loads an agent of five lines (a stub package stands in for torch). A cycle is a whole attach to a real
training with every observing plugin, a step observed, and a detach. No process gets more than 100 cycles.
Prints a line for each process and one JSON object at the end: crashes, hangs, leftovers, wrong results, the stops.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.config import PluginSpec
from hookd.tool.linux import proc
from tests.bench.attach.kinds import KINDS, LEFT
from tests.bench.attach.trainer import BESIDE
from tests.bench.attach.training import Training
from tests.support import interpreters, stub
from tests.support.processes import Process, wait_until
from tests.support.tool import Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.interpreters import Interpreter

MOST_CYCLES = 100
PLUGINS = tuple(PluginSpec(name, {}, by_name=True) for name in ("nan", "timing", "activations", "learning"))
REQUEST = AttachRequest(plugins=PLUGINS, timeout_s=60)
PASSES = b"""
import sys
def start(config, loader=None):
    sys.hookd_starts = getattr(sys, "hookd_starts", 0) + 1
    before = sys.__dict__.get("hookd_last")
    if before is not None:
        before.purge()
    sys.hookd_last = loader
"""


@dataclass
class Tally:
    """The results of all attaches to one process."""

    python: str
    kind: str
    way: str
    done: int = 0
    crashes: int = 0
    hangs: int = 0
    leftovers: list[str] = field(default_factory=list)
    wrong: int = 0
    pauses_ms: list[float] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.crashes or self.hangs or self.leftovers or self.wrong)

    def line(self) -> str:
        stops = f"{statistics.median(self.pauses_ms):.2f} ms, max {max(self.pauses_ms):.2f}" if self.pauses_ms else "-"
        return (
            f"{self.python:44} {self.way:12} {self.kind:11} {self.done:5} crashes {self.crashes} hangs {self.hangs} "
            f"leftovers {len(self.leftovers)} wrong {self.wrong} stop {stops} {self.leftovers or ''}"
        )


def inject_into(python: Interpreter, kind: str, count: int, *, force: bool) -> Tally:
    tally = Tally(str(python), kind, "forced stop" if force else "injection")
    request = AttachRequest(plugins=(), timeout_s=60, force=force)
    with python.directory() as directory, stub.start(directory, LEFT + KINDS[kind], python) as target:
        files = _descriptors(target.pid)
        threads = stub.threads(target.pid)
        for _ in range(count):
            if not _once(tally, target, lambda: stub.inject(target.pid, PASSES, request).pause_s):
                break
        _look_for_leftovers(tally, target.pid, threads, files)
        if tally.crashes == tally.hangs == 0:
            _close(tally, target)
    return tally


def _once(tally: Tally, target: Process, act: Callable[[], float]) -> bool:
    """Attach once more; return False if it is pointless to go on."""
    try:
        tally.pauses_ms.append(1e3 * act())
    except (HookdError, AssertionError) as exc:
        has_died = target.popen.poll() is not None
        tally.crashes += has_died
        tally.hangs += not has_died
        print(f"  {tally.python} {tally.kind}: {exc} {target.describe()}", flush=True)
        return False
    tally.done += 1
    return True


def _look_for_leftovers(tally: Tally, pid: int, threads: int, files: int) -> None:
    for what, look in {
        "threads": lambda: stub.threads(pid) <= threads,
        "descriptors": lambda: _descriptors(pid) <= files,
        "mailboxes": lambda: not stub.mailboxes(pid),
        "memfd": lambda: not [m for m in proc.maps(pid) if "memfd" in m.path],
    }.items():
        try:
            wait_until(look, 10)
        except AssertionError:
            tally.leftovers.append(what)
        except (FileNotFoundError, HookdError):
            return  # it has died, which is counted elsewhere


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _close(tally: Tally, target: Process) -> None:
    """End a target and read what it reports about itself."""
    target.send("end")
    try:
        lines = target.finish()
    except AssertionError as exc:
        print(f"  {tally.python} {tally.kind}: {exc}", flush=True)
        tally.crashes += 1
        return
    left = json.loads(next(line for line in lines if line.startswith("left "))[5:])
    if left.pop("starts") != tally.done or stub.checksum() not in lines or target.err:
        tally.wrong += 1
        print(target.describe(), flush=True)
    tally.leftovers += [name for name, value in left.items() if value]


def cycle_in(python: Interpreter, kind: str, count: int) -> Tally:
    tally = Tally(str(python), kind, "cycle")
    with Training(python, "--beside", kind) as training:
        pid = training.process.pid
        threads, files = stub.threads(pid), _descriptors(pid)
        for _ in range(count):
            if not _once(tally, training.process, lambda: _cycle(pid)):
                break
            if kind in ("nothing", "itimer", "threads", "malloc", "native", "events"):  # the others come and go
                _look_for_leftovers(tally, pid, threads, files)
        if tally.crashes == tally.hangs == 0:
            tally.wrong += training.finish() != plain_checksum(python)
            tally.wrong += training.wrong
    return tally


def _cycle(pid: int) -> float:
    """Attach, wait for a step, detach; return the seconds of the stop."""
    result = attach(pid, REQUEST)
    page = Page.of(pid)
    assert page is not None, "no page after an attach"
    with page:
        wait_until(lambda: page.values()["hookd_steps"].get((), 0) >= 1, what="a step is counted")
    answer = detach(pid, 60)
    assert answer["restored"] == "identity", answer
    assert not result.control.exists(), f"{result.control} is left"
    return result.pause_s


_plain: dict[str, str] = {}


def plain_checksum(python: Interpreter) -> str:
    """Return the checksum of a training to which nobody has attached."""
    if str(python) not in _plain:
        with Training(python) as training:
            _plain[str(python)] = training.finish()
    return _plain[str(python)]


def run(injections: int, cycles: int, wanted: str = "") -> list[Tally]:
    """Distribute the work evenly over all processes."""
    pythons = [one for one in interpreters.found() if wanted in str(one)]
    builds = {(one.version, one.is_shared, one.root): one for one in pythons}.values()
    targets = [(one, kind, force) for one in builds for force in _ways(one) for kind in KINDS]
    tallies = []
    for python, kind, force in targets if injections else []:
        tallies.append(inject_into(python, kind, math.ceil(injections / len(targets)), force=force))
        print(tallies[-1].line(), flush=True)
    trainings = [(one, kind) for one in pythons if one.torch for kind in BESIDE]
    for python, kind in trainings if cycles else []:
        tallies.append(cycle_in(python, kind, min(MOST_CYCLES, math.ceil(cycles / len(trainings)))))
        print(tallies[-1].line(), flush=True)
    return tallies


def _ways(python: Interpreter) -> tuple[bool, ...]:
    """From 3.14 on nothing is stopped; the stop, which remains for targets without a place for a file, is tried too."""
    return (False, True) if python.minor >= (3, 14) else (False,)


def summary(tallies: list[Tally]) -> dict[str, object]:
    pauses = sorted(pause for one in tallies for pause in one.pauses_ms if pause)
    return {
        "injections": sum(one.done for one in tallies if one.way != "cycle"),
        "cycles": sum(one.done for one in tallies if one.way == "cycle"),
        "crashes": sum(one.crashes for one in tallies),
        "hangs": sum(one.hangs for one in tallies),
        "leftovers": sum(len(one.leftovers) for one in tallies),
        "wrong": sum(one.wrong for one in tallies),
        "processes": len(tallies),
        "stop_ms": {
            "n": len(pauses), "p50": round(statistics.median(pauses), 3),
            "p95": round(pauses[int(0.95 * len(pauses))], 3), "max": round(pauses[-1], 3),
        } if pauses else {},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=5000)
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--python", default="", help="only those whose description contains this")
    parser.add_argument("--out", type=Path, help="where all figures go, as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    tallies = run(arguments.injections, arguments.cycles, arguments.python)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(one) for one in tallies]))
    print(json.dumps({**summary(tallies), "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
