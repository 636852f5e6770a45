"""Attach to one training with hookd and with debugger-based tools, in turn; measure for how long each stops it.

    python -m tests.bench.attach.peers [--rounds N] [--peers PYTHON]

PYTHON must be in an environment with torch, and with memray and debugpy if they are to be compared; gdb is looked up in
PATH. The stop is the longest step of the training during the attach, minus its median step; hookd also
reports its stop itself. The wall time lasts until the tool has reached the training: for hookd, until a step was counted.
What debugpy and memray load stays in the process, so each round has a training of its own, and they come last.
Prints one JSON object, times in ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.linux import proc
from tests.bench.attach.steps import PLUGINS, largest, median, spread
from tests.bench.attach.training import Training
from tests.support import interpreters
from tests.support.environment import bare_python, target_environment
from tests.support.processes import wait_until
from tests.support.tool import Page

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 120


class Peers:
    """The ways to attach; each returns when it has reached the training."""

    def __init__(self, python: str, directory: Path) -> None:
        self.python, self._directory = python, directory

    def available(self) -> dict[str, Callable[[int], object]]:
        found: dict[str, Callable[[int], object]] = {"hookd": self.hookd}
        if shutil.which("gdb"):
            found["gdb"] = self.gdb
            found |= {name: getattr(self, name) for name in ("memray", "debugpy") if self._has(name)}
        return found

    def _has(self, module: str) -> bool:
        return subprocess.run([self.python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0

    def hookd(self, pid: int) -> float:
        result = attach(pid, AttachRequest(plugins=PLUGINS))
        page = Page.of(pid)
        assert page is not None
        with page:
            wait_until(lambda: page.values()["hookd_steps"].get((), 0) >= 1)
        return 1e3 * result.pause_s

    def gdb(self, pid: int) -> None:
        """Only stop the process and let it go: the least that every tool pays that uses gdb."""
        self._run("gdb", "-nx", "-p", str(pid), "-batch")

    def memray(self, pid: int) -> None:
        """Track allocations into a file, by gdb."""
        out = self._directory / f"memray-{pid}-{time.monotonic_ns()}"
        self._run(self.python, "-m", "memray", "attach", "--method", "gdb", "-o", str(out), str(pid))

    def debugpy(self, pid: int) -> None:
        """Make the training listen for debuggers, and connect."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._run(self.python, "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--pid", str(pid))

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        wait_until(listens, PATIENCE_S)
        # Its adapter, which listens, is a process of its own, whether or not the training was reached.
        wait_until(lambda: any("attach_linux" in one.path for one in proc.maps(pid)), 10, "debugpy in the training")

    def _run(self, *command: str) -> None:
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S, env=target_environment())


def measure(python: str, rounds: int) -> dict[str, object]:
    target = interpreters.at(python)
    if target is None or target.torch is None:
        raise SystemExit(f"{python} is not a Python with torch that hookd can attach to")
    figures: dict[str, object] = {"python": str(target), "rounds": rounds}
    with tempfile.TemporaryDirectory() as directory:
        peers = Peers(python, Path(directory))
        available = peers.available()
        figures["missing"] = sorted({"gdb", "memray", "debugpy"} - available.keys())
        one: dict[str, list[dict[str, float]]] = {name: [] for name in available}
        for _ in range(rounds):
            with Training(target) as training:
                for name in sorted(available, key=("hookd", "gdb", "debugpy", "memray").index):
                    try:
                        one[name].append(_attach_once(training, available[name]))
                    except (AssertionError, subprocess.SubprocessError) as exc:
                        print(f"{name}: {exc}", file=sys.stderr)
                        continue
                    print(name, {key: round(value, 2) for key, value in one[name][-1].items()}, file=sys.stderr)
                    if name == "hookd":
                        detach(training.process.pid)
    for name, found in one.items():
        keys = found[0] if found else ()
        figures[name] = {"n": len(found), **{key: spread(sorted(each[key] for each in found)) for key in keys}}
    return figures


def _attach_once(training: Training, act: Callable[[int], object]) -> dict[str, float]:
    begun, before = time.monotonic_ns(), training.steps
    stop_ms = act(training.process.pid)
    ended = time.monotonic_ns()
    wait_until(lambda: training.steps > before + 1, PATIENCE_S, "the training goes on")
    time.sleep(0.2)
    taken = training.taken()
    gap = largest(taken, (begun, ended + 100_000_000)) - median(taken)
    found = {"wall": (ended - begun) / 1e6, "gap": max(0.0, gap)}
    return found | ({"stop": stop_ms} if isinstance(stop_ms, float) else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--peers", help="a Python with torch, memray and debugpy")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.peers or str(bare_python()), arguments.rounds)))


if __name__ == "__main__":
    main()
