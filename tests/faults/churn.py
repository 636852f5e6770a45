"""A day of a busy node in some minutes: targets come, live and die by the thousand, and the daemon is killed meanwhile.

    python -m tests.faults.churn [--targets N] [--alive N] [--json]

Each target is a process of its own that holds a real page, without torch. They end by SIGKILL, as a script that comes to
its end, by a detach, and with a spoilt page. After each tenth of them all targets end, and the daemon's idle state
is measured: resident memory, descriptors, threads, rows of the incident store. The run fails if memory or descriptors
grow. The daemon is killed twice within the first quarter, so that most of the day belongs to one life of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.support.daemon import Daemon
from tests.support.herd import Herd
from tests.support.processes import wait_until

ENDS = ("kill", "exit", "leave", "spoil")
BATCH = 20
PLATEAUS = 10
MOST_MIB = 8.0
"""Allowed growth in the daemon's last life: SQLite fills its cache of 2 MB, malloc keeps some memory."""


@dataclass
class Plateau:
    """The resources of a daemon while it has no target."""

    life: int
    targets: int
    rss_mib: float
    fds: int
    threads: int
    incidents: int
    store_kib: float


class Day:
    """A daemon, its targets, and the measurements."""

    def __init__(self, home: Path, alive: int) -> None:
        self.home = home
        self.alive = alive
        self.herd = Herd()
        self.life = 0
        self.seen = 0
        self.daemon = self._serve()
        self.living: list[list[int]] = []
        self.ends = itertools.cycle(ENDS)
        self.plateaus: list[Plateau] = []

    def _serve(self) -> Daemon:
        self.life += 1
        return Daemon(self.home, "--linger-s", "1")

    def kill_daemon(self) -> None:
        """Kill the daemon while targets are alive, and start the next one."""
        self.daemon.process.signal(signal.SIGKILL)
        self.daemon.process.wait()
        self.daemon = self._serve()

    def live(self, count: int) -> None:
        """Start `count` more targets, end as many others, and scrape as Prometheus would."""
        for _ in range(count // BATCH):
            pids = self.herd.start(BATCH, "churn")
            self.living.append(pids)
            self.seen += BATCH
            wait_until(lambda pids=pids: set(pids) <= self._served(), what="the new targets")
            if len(self.living) * BATCH > self.alive:
                self.herd.end(self.living.pop(0), next(self.ends))
            self.daemon.get("/metrics")

    def rest(self) -> Plateau:
        """End all targets, wait until none is served, and measure."""
        while self.living:
            self.herd.end(self.living.pop(0), next(self.ends))
        wait_until(lambda: not self._served(), what="all targets have gone")
        self.daemon.get("/metrics")
        process = psutil.Process(self.daemon.process.pid)
        with closing(sqlite3.connect(self.home / "state" / "incidents.sqlite")) as store:
            (incidents,) = store.execute("SELECT COUNT(*) FROM incidents").fetchone()
        size = sum(path.stat().st_size for path in (self.home / "state").iterdir())
        found = Plateau(
            self.life, self.seen, round(process.memory_info().rss / 2**20, 1), process.num_fds(),
            process.num_threads(), incidents, round(size / 1024, 1),
        )  # fmt: skip
        self.plateaus.append(found)
        return found

    def _served(self) -> set[int]:
        return {row["pid"] for row in self.daemon.client.targets()}

    def close(self) -> None:
        self.herd.close()
        self.daemon.process.close()


def run(targets: int, alive: int) -> list[Plateau]:
    """Run through a day; return the daemon's resources at each plateau."""
    with tempfile.TemporaryDirectory(prefix="hookd-churn-") as home, closing(Day(Path(home), alive)) as day:
        for n in range(PLATEAUS):
            day.live(targets // PLATEAUS)
            if n < 2:
                day.kill_daemon()
            found = day.rest()
            print(json.dumps(asdict(found)), file=sys.stderr, flush=True)
        return day.plateaus


def grown(plateaus: list[Plateau]) -> tuple[float, int]:
    """Return the growth in the last life: MiB since its second plateau, and descriptors since its first."""
    last = [one for one in plateaus if one.life == plateaus[-1].life]
    return last[-1].rss_mib - last[min(1, len(last) - 1)].rss_mib, last[-1].fds - last[0].fds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=5000)
    parser.add_argument("--alive", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    begun = time.monotonic()
    plateaus = run(arguments.targets, arguments.alive)
    mib, fds = grown(plateaus)
    if arguments.json:
        print(json.dumps([asdict(one) for one in plateaus]))
    print(
        f"{arguments.targets} targets in {time.monotonic() - begun:.0f} s; the last life grew by {mib:.1f} MiB, {fds} fds"
    )
    return int(mib > MOST_MIB or fds > 0)


if __name__ == "__main__":
    sys.exit(main())
