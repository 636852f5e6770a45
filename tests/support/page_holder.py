"""A process that holds a real page and follows commands on stdin: a target without torch and without an agent.

`python page_holder.py IDENTITY` merges a JSON object into the default identity and prints "ready"; each further line
is a JSON object with one key, the name of a function below, and its arguments; it answers "done".
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from hookd.wire.page import EVENTS, PHASE, PHASES, PageWriter


class Holder:
    def __init__(self, changes):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        identity = {
            "agent_version": "0", "protocol": 1, "pid": os.getpid(), "ppid": os.getppid(), "start_ticks": ticks,
            "started": time.time(), "attached": time.time(), "python": "3.11.9", "torch": "2.13.0",
            "script": "/jobs/train.py", "run": "train.py", "rank": 0, "local_rank": 0, "world_size": 1, "control": "", "is_named": True,
            "method": "start", "uid": os.getuid(), "step_offset": None, "keep": False,
        }  # fmt: skip
        self.identity = {**identity, **changes}
        self.page = None
        self.open()

    def open(self):
        """Hold a new page, as after another attach."""
        self.page = PageWriter.create(self.identity)
        self.page.set_state("running")
        self.beat = self.page.thread(os.getpid(), "main")

    def put(self, name, kind, value, labels=None, buckets=()):
        """Set the cells of a series, and declare it if it is new; `value` is a list for a histogram."""
        labels = labels or {}
        family = self.page.family(name, kind, "A test's family.", tuple(labels), tuple(buckets))
        first = self.page.series(family, tuple(labels.values()))
        for n, cell in enumerate(value if isinstance(value, list) else [value]):
            self.page.cells[first + n] = float(cell)

    def modules(self, count):
        """Add timing of `count` modules named like a deep model's."""
        for family, kind in (("hookd_timing_forward_seconds", "counter"), ("hookd_activations_mean", "gauge")):
            for n in range(count):
                self.put(family, kind, n + 1, {"module": f"model.layers.{n}.mlp"})

    def event(self):
        self.page.cells[self.beat + EVENTS] += 1
        self.page.cells[self.beat + PHASE] = PHASES.index("forward")

    def steps(self, seconds):
        """Record steps of these lengths."""
        for n, one in enumerate(seconds, 1):
            self.page.record(1, 0, n, one)

    def incident(self, **fields):
        self.page.incident(fields)

    def rename(self, **changes):
        """Claim another identity in the page."""
        self.page.update_identity(**changes)

    def silence(self):
        """Claim in the page that an agent answers at a socket of ours, and never answer there."""
        self.sockets = socket.socketpair()
        outer = self.sockets[0].fileno()
        self.page.update_identity(method="attach", control=f"@{outer}:{os.fstat(outer).st_ino}")

    def state(self, name):
        self.page.set_state(name)

    def spoil(self):
        """Write nonsense over the header's table and the schema's head, as a hostile process would."""
        os.pwrite(self.page.fd, b"\xff" * 4000, 0)

    def leave(self, sent_away=True):
        """Leave as an agent does that was detached, or that leaves by itself."""
        if sent_away:
            self.page.update_identity(sent_away=True)
        self.page.set_state("detached")
        self.page.close()

    def fork(self):
        """Fork a child that inherits the page and outlives us until its stdin ends."""
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)

    def end(self, code, state="running"):
        """End with an exit code; by Python's own exit if `state` says so."""
        self.page.set_state(state)
        os._exit(code)

    def become(self, *command):
        os.execv(command[0], command)


def main():
    holder = Holder(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    print("ready", flush=True)
    for line in sys.stdin:
        ((verb, arguments),) = json.loads(line).items()
        if isinstance(arguments, dict):
            getattr(holder, verb)(**arguments)
        else:
            getattr(holder, verb)(*arguments)
        print("done", flush=True)


if __name__ == "__main__":
    main()
