"""Floods of incidents: a user's targets tell of so much that another user's single incident might be lost."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.attacks.attack import ATTACKER, VICTIM, Result, attack
from tests.attacks.people import process_of
from tests.support.daemon import Daemon, tell
from tests.support.environment import REPOSITORY
from tests.support.processes import Process, wait_until
from tests.support.tool import start_hookd

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLDER = REPOSITORY / "tests" / "support" / "page_holder.py"
FLOODER = Path(__file__).with_name("flooder.py")
RETENTION_MB = 4
"""Retention limit of the store, which a flood would exceed in seconds."""
MOST_MB = 80
"""Memory that the daemon may need more than before the flood."""
SOON_S = 5.0
MOST_LINES = 3000
"""Lines of /metrics for a hostile target and a victim together."""
FIRST, SECOND = "the victim's first NaN", "the victim's second NaN"


@dataclass
class Scene:
    """A root daemon with a target of the victim that has published one incident."""

    folder: Path
    daemon: Daemon
    victim: Process

    def listed(self) -> list[str]:
        """Return the messages that `hookd incidents` shows to root."""
        with start_hookd("incidents", "--json", "--host", f"unix://{self.folder}/control.sock") as listing:
            return [row["message"] for row in json.loads("\n".join(listing.finish()))["incidents"]]

    def stored(self) -> list[str]:
        """Return the victim's messages in the file."""
        path = self.folder / "state" / "incidents.sqlite"
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
            return [text for (text,) in file.execute("SELECT message FROM incidents WHERE run = 'victim'")]

    def misses(self, message: str) -> list[str]:
        """Return where a message of the victim is missing."""
        places = {
            "`hookd incidents`": lambda: message in self.listed(),
            "the first page": lambda: message in self.daemon.get("/").replace("&#x27;", "'").replace("&#39;", "'"),
            "the store": lambda: message in self.stored(),
        }
        return [place for place, is_there in places.items() if not is_there()]

    def rss_mb(self) -> float:
        return psutil.Process(self.daemon.process.pid).memory_info().rss / 1e6

    def store_mb(self) -> float:
        return sum(one.stat().st_size for one in (self.folder / "state").glob("incidents.sqlite*")) / 1e6


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Start the daemon and the victim's target, and wait until its incident is there."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flood-")))
        config = folder / "hookd.toml"
        config.write_text(f"[serve]\nretention_mb = {RETENTION_MB}\n")
        daemon = Daemon(folder, "--config", config)
        stack.callback(daemon.process.close)
        victim = stack.enter_context(process_of(VICTIM, [sys.executable, HOLDER, json.dumps({"run": "victim"})]))
        victim.expect("^ready$")
        tell(victim, incident={"kind": "nan", "message": FIRST})
        made = Scene(folder, daemon, victim)
        wait_until(lambda: not made.misses(FIRST), what="the victim's incident")
        yield made


def _flood(tries: int, **plan: object) -> Result:
    """Flood, and look what became of the victim's incidents: one reported before, one when half of the flood was reported."""
    whole = {
        "count": tries,
        "processes": 1,
        "runs": 1,
        "kinds": 1,
        "texts": "new",
        "bytes": 900,
        "pause_s": 0.05,
        **plan,
    }
    with scene() as made, process_of(ATTACKER, [sys.executable, FLOODER, json.dumps(whole)]) as flooder:
        flooder.expect("^ready$")
        wait_until(lambda: "flood-0" in made.daemon.get("/metrics"), what="the hostile target")
        before, begun = made.rss_mb(), time.monotonic()
        flooder.send("go")
        wait_until(lambda: any("flood" in one for one in made.listed()), what="the flood")
        tell(made.victim, incident={"kind": "inf", "message": SECOND})
        reported_at = time.monotonic()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: SECOND in made.stored(), SOON_S, what="the victim's second incident")
        arrived = time.monotonic() - reported_at
        flooder.expect(r"^reported (\d+)$", timeout_s=900)
        spent = time.monotonic() - begun
        wait_until(made.daemon.is_ready, what="the daemon")
        time.sleep(1)  # the last reports are read
        bad = [f"{what} is not in {place}" for what in (FIRST, SECOND) for place in made.misses(what)]
        more, size, lines = made.rss_mb() - before, made.store_mb(), made.daemon.get("/metrics").count("\n")
        bad += [f"the second one took more than {SOON_S:g} s"] * (arrived > SOON_S)
        bad += [f"the daemon needs {more:.0f} MB more"] * (more > MOST_MB)
        bad += [f"the store has {size:.1f} MB"] * (size > RETENTION_MB + 18)
        bad += [f"/metrics has {lines} lines"] * (lines > MOST_LINES)
    seen = (
        f"{whole['count']:,} incidents reported in {spent:.0f} s; another user's arrived after {arrived:.1f} s; the daemon took"
        f" {more:.0f} MB more, the store has {size:.1f} MB, /metrics {lines} lines"
    )
    return Result(tries, len(bad), "; ".join([*bad, seen]))


@attack(
    "a target",
    "One target tells ever new incidents, to push another user's out of the store",
    tries=1_000_000,
    short=20_000,
)
def flood_of_texts(tries: int) -> Result:
    return _flood(tries)


@attack("a target", "One target tells the same incident again and again", tries=1_000_000, short=20_000, is_long=True)
def flood_of_equals(tries: int) -> Result:
    return _flood(tries, texts="equal", bytes=40)


@attack(
    "a target",
    "One target tells incidents of ever new kinds, to fill memory, /metrics and the first page",
    tries=100_000,
    short=20_000,
    is_long=True,
)
def flood_of_kinds(tries: int) -> Result:
    return _flood(tries, kinds=min(tries, 40_000), bytes=40)


@attack(
    "another user",
    "Many processes of one user, each of a run of its own, tell huge incidents",
    tries=200_000,
    short=20_000,
    is_long=True,
)
def flood_of_runs(tries: int) -> Result:
    return _flood(tries, processes=40, runs=40, bytes=4000)
