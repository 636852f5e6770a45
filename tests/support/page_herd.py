"""A process that forks dozens of holders of real pages: targets without torch, each of which costs some milliseconds.

Each line on stdin is a JSON object with one key, the name of a method of `Herd`, and its arguments by name; the answer
is a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from hookd.wire.page import EVENTS, PageWriter

BEAT_S = 0.5
NUMBERS = {"kill": signal.SIGKILL, "exit": signal.SIGTERM, "leave": signal.SIGUSR1, "spoil": signal.SIGUSR2}


class Herd:
    def __init__(self):
        self.alive = {}
        self.serial = 0

    def start(self, count, run, modules=8):
        """Fork holders, each of a run of its own; return their pids once their pages exist."""
        pids = []
        for _ in range(count):
            self.serial += 1
            ready, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(ready)
                _hold(f"{run}-{self.serial}", self.serial, modules, writer)
            os.close(writer)
            os.read(ready, 1)
            os.close(ready)
            self.alive[pid] = None
            pids.append(pid)
        return pids

    def end(self, pids, how):
        """End holders: by SIGKILL, as a script at its end, as after a detach, or with a spoilt page."""
        for pid in pids:
            self.signal(pid, how)
        for pid in pids:
            os.waitpid(pid, 0)
            del self.alive[pid]
        return len(pids)

    def signal(self, pid, how):
        """Send one holder the signal to end, and do not wait for it."""
        os.kill(pid, NUMBERS[how])
        return 1

    def close(self):
        self.end(list(self.alive), "kill")


def _hold(run, serial, modules, writer):
    """Hold a page until a signal says how to end."""
    sys.stdin = None
    page = PageWriter.create(_identity(run))
    steps = page.series(page.family("hookd_steps", "counter", "Steps.", ()), ())
    times = page.family("hookd_step_seconds", "histogram", "Seconds of a step.", (), (0.1, 1.0))
    spent = page.series(times, ())
    forward = page.family("hookd_timing_forward_seconds", "counter", "Seconds in forward.", ("module",))
    cells = [page.series(forward, (f"layers.{n}",)) for n in range(modules)]
    page.set_state("running")
    beat = page.thread(os.getpid(), "main")
    if serial % 3 == 0:
        page.incident({"kind": "nan", "message": "first NaN: layers.0 output", "step": 1, "time": time.time()})

    def end(number, _frame):
        if number == signal.SIGUSR2:
            os.pwrite(page.fd, b"\xff" * 4000, 0)
            time.sleep(2 * BEAT_S)
        else:
            page.set_state("exited" if number == signal.SIGTERM else "detached")
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, end)
    os.write(writer, b"r")
    os.close(writer)
    while True:
        for cell in (steps, spent, spent + 3, beat + EVENTS, *cells):
            page.cells[cell] += 1
        time.sleep(BEAT_S)


def _identity(run):
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return {
        "agent_version": "0", "protocol": 1, "pid": os.getpid(), "ppid": os.getppid(), "start_ticks": ticks,
        "started": time.time(), "attached": time.time(), "python": "3.11.9", "torch": "2.13.0",
        "script": "/jobs/train.py", "run": run, "rank": 0, "local_rank": 0, "world_size": 1, "control": "", "is_named": True,
        "method": "start", "uid": os.getuid(), "step_offset": None, "keep": False,
    }  # fmt: skip


def main():
    herd = Herd()
    with contextlib.closing(herd):
        print("ready", flush=True)
        for line in sys.stdin:
            ((verb, arguments),) = json.loads(line).items()
            print(json.dumps(getattr(herd, verb)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
