"""Hostile targets: processes that hold real pages and publish incidents as fast as a daemon reads them.

    python flooder.py '{"count": 20000, "processes": 1, "runs": 1, "kinds": 1, "texts": "equal", "bytes": 900, "pause_s": 0.1}'

Prints "ready" when its pages exist, starts at a line on stdin, and prints the number of incidents that it has published.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hookd.wire.page import PageWriter

AT_ONCE = 300
"""Incidents between two pauses: a page has room for about as many long ones, and nobody reads those that do not fit."""


def identity(run):
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return {
        "agent_version": "0", "protocol": 1, "pid": os.getpid(), "ppid": os.getppid(), "start_ticks": ticks,
        "started": time.time(), "attached": time.time(), "python": "3.11.9", "torch": "2.13.0",
        "script": "/jobs/flood.py", "run": run, "rank": 0, "local_rank": 0, "world_size": 1, "control": "", "is_named": True,
        "method": "start", "uid": os.getuid(), "step_offset": None, "keep": False,
    }  # fmt: skip


def word(number):
    """Return a word for a number, without a digit: incidents that differ in numbers alone count as the same."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def counted(page, kinds):
    """Publish a series of hookd_incidents for each kind, as the agent does."""
    family = page.family("hookd_incidents", "counter", "Incidents, by kind.", ("kind",))
    for n in range(kinds):
        page.cells[page.series(family, (f"flood_{word(n)}",))] = 1.0


def tell(page, plan, begin):
    """Publish this process's share of the incidents; return their number."""
    text = "x" * plan["bytes"]
    share = plan["count"] // plan["processes"]
    for n in range(share):
        name = word(begin + n)
        kind = "flood" if plan["kinds"] == 1 else f"flood_{word((begin + n) % plan['kinds'])}"
        page.incident({"kind": kind, "message": f"flood {n if plan['texts'] == 'equal' else name} {text}", "step": n})
        if n % AT_ONCE == AT_ONCE - 1:
            time.sleep(plan["pause_s"])
    return share


def main():
    plan = json.loads(sys.argv[1])
    ends = []
    for n in range(plan["processes"]):
        ready, writer = os.pipe()
        go, going = os.pipe()
        if os.fork() == 0:
            os.close(going)
            page = PageWriter.create(identity(f"flood-{n % plan['runs']}"))
            if plan["kinds"] > 1:
                counted(page, plan["kinds"])
            page.set_state("running")
            os.write(writer, b"r")
            os.read(go, 1)
            tell(page, plan, n * (plan["count"] // plan["processes"]))
            os.write(writer, b"d")
            os.read(go, 1)  # the page is read until the other end is closed
            os._exit(0)
        os.close(writer)
        os.close(go)
        os.read(ready, 1)
        ends.append((ready, going))
    print("ready", flush=True)
    sys.stdin.readline()
    for _, going in ends:
        os.write(going, b"g")
    for ready, _ in ends:
        os.read(ready, 1)
    print(f"reported {plan['count'] // plan['processes'] * plan['processes']}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
