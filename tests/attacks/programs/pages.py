"""Forks processes that hold pages, each a run of its own with some modules, and do nothing.

A line on stdin is the number of processes that shall live; the answer is that number, once their pages exist. The argument
is the number of modules of each; those after the first LARGE, of which a daemon serves none, have a tenth.
"""

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

from hookd.wire.page import PageWriter

LARGE = 500


def hold(number, modules, writer):
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    page = PageWriter.create({
        "agent_version": "0", "protocol": 1, "pid": os.getpid(), "ppid": os.getppid(), "start_ticks": ticks,
        "started": time.time(), "attached": time.time(), "script": f"/jobs/fake-{number}.py", "run": f"fake-{number}",
        "rank": 0, "local_rank": 0, "world_size": 1, "control": "", "method": "start", "keep": False,
    })  # fmt: skip
    page.series(page.family("hookd_steps", "counter", "Steps.", ()), ())
    forward = page.family("hookd_timing_forward_seconds", "counter", "Seconds in forward.", ("module",))
    for module in range(modules):
        page.cells[page.series(forward, (f"layers.{module}",))] = module
    errors = page.family("hookd_plugin_errors", "counter", "Of the agent itself.", ("plugin", "hook"))
    for hook in range(10 * modules):
        page.series(errors, ("fake", f"hook_{hook}"))
    page.set_state("running")
    os.write(writer, b"r")
    while True:
        ctypes.CDLL(None).pause()


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    gc.freeze()
    ready, writer = os.pipe()
    alive = []
    print("ready", flush=True)
    for line in sys.stdin:
        while len(alive) < int(line):
            pid = os.fork()
            if pid == 0:
                hold(len(alive), int(sys.argv[1]) // (10 if len(alive) >= LARGE else 1), writer)
            alive.append(pid)
            os.read(ready, 1)
        print(len(alive), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
