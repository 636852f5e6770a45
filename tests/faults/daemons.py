"""The daemon itself is killed, starved, replaced, misled."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import psutil

from tests.faults.scene import Said, fault, root
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import wait_until
from tests.support.tool import Metrics

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.scene import Scene
    from tests.support.daemon import Daemon

TARGETS = 50
GROWING = ("_total", "_count", "_sum", "_bucket")
OWN = ("hookd_attach_total", "hookd_attach_pause_seconds")
NOTHING_LOST = "nothing: all series are there, no counter is smaller"
OFFSET = """
import time
real = time.time
def moved():
    with open({file!r}) as file:
        return real() + float(file.read() or 0)
time.time = moved
"""


def _served(scene: Scene) -> set[int]:
    return {row["pid"] for row in scene.daemon.client.targets() if row["state"] == "attached"}


def _counters(metrics: Metrics) -> dict[tuple[object, ...], float]:
    """Return all counters of targets; those of the daemon's own begin anew with it."""
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for one in metrics.samples
        if one.name.endswith(GROWING) and not one.name.startswith(OWN)
    }


def _again(scene: Scene, port: int, number: signal.Signals) -> Said:
    """End the daemon, start the next one, and take the time from its start to its first whole answer."""
    before = _counters(scene.daemon.metrics())
    scene.daemon.process.signal(number)
    scene.daemon.process.wait()
    scene.now()
    address = ("--listen", f"127.0.0.1:{port}")
    state = ("--state-dir", scene.home / "state", "--control", scene.daemon.client.path)
    daemon = subprocess.Popen(
        [sys.executable, "-m", "hookd", "serve", *address, *state],
        stderr=subprocess.PIPE,
        text=True,
        env=tool_environment(),
    )
    scene.stack.callback(daemon.wait)
    scene.stack.callback(daemon.kill)
    text = wait_until(lambda: _get(f"http://127.0.0.1:{port}/metrics"), what="an answer")
    seconds, used = scene.elapsed(), psutil.Process(daemon.pid).cpu_times()
    after = _counters(Metrics(text))
    assert after.keys() >= before.keys(), f"missing: {sorted(before.keys() - after.keys(), key=str)[:3]}"
    smaller = [key for key in before if after[key] < before[key]]
    assert not smaller, f"smaller: {smaller[:3]}"
    assert daemon.stderr is not None
    line = next(line for line in daemon.stderr if " serves " in line)
    words = line.partition("hookd INFO: ")[2].partition(", control")[0]
    what = f"{len(after)} counters of {TARGETS} targets, {used.user + used.system:.1f} s of CPU time"
    return Said(f"{words}: {what}", seconds, NOTHING_LOST)


def _get(url: str) -> str:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()
    return ""


def _settled(scene: Scene) -> int:
    """Start the targets of a restart, wait until all are served, and return the daemon's port."""
    pids = scene.herd().start(TARGETS, "job")
    wait_until(lambda: _served(scene) == set(pids), what="discovery")
    return int(scene.daemon.url.rpartition(":")[2])


@fault(f"The daemon is killed and comes back, {TARGETS} targets", "kill -9 of `hookd serve`, then it is started again")
def daemon_killed(scene: Scene) -> Said:
    scene.serve()
    return _again(scene, _settled(scene), signal.SIGKILL)


@fault(f"The daemon is upgraded, {TARGETS} targets", "SIGTERM to the daemon of an older version, then ours is started")
def daemon_upgraded(scene: Scene) -> Said:
    for name in ("hookd", "plugins"):
        shutil.copytree(REPOSITORY / name, scene.home / name, ignore=shutil.ignore_patterns("__pycache__"))
    (scene.home / "hookd" / "version.py").write_text('__version__ = "0.0.9"\n')
    scene.serve(PYTHONPATH=f"{scene.home}:{scene.home / 'plugins'}", cwd=scene.home)
    assert scene.daemon.client.version()["version"] == "0.0.9"
    return _again(scene, _settled(scene), signal.SIGTERM)


@fault(
    "A target dies while no daemon runs", "kill -9 of `hookd serve`, then of the target; the daemon is started again"
)
def died_meanwhile(scene: Scene) -> Said:
    scene.serve()
    herd = scene.herd()
    (pid,) = herd.start(1, "job")
    wait_until(lambda: scene.daemon.rows("job-1"), what="discovery")
    wait_until((scene.home / "state" / "held.json").exists, what="the note")
    time.sleep(1)
    scene.daemon.process.signal(signal.SIGKILL)
    scene.daemon.process.wait()
    herd.end([pid], "kill")
    scene.now()
    scene.serve()
    return scene.hears(rf"lost in process {pid} ", lost="its page: series, last events, and how it ended")


@fault("The disk of the state directory is full", "mount -t tmpfs -o size=1m, then a file that fills it; then it goes")
def disk_full(scene: Scene) -> Said:
    root()
    state = scene.home / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", state], check=True)
    scene.stack.callback(subprocess.run, ["umount", "-l", state], check=True)
    with contextlib.suppress(OSError):
        (state / "other").write_bytes(bytes(2 << 20))
    scene.now()
    scene.serve()
    herd = scene.herd()
    (pid,) = herd.start(1, "job")
    said = scene.hears(r"WARNING: incidents ", lost="")
    wait_until(lambda: _served(scene) == {pid}, what="discovery")
    herd.end([pid], "kill")
    reported = scene.hears(
        rf"lost in process {pid} ", lost="nothing: what waits in memory is written once there is room"
    )
    assert reported.seconds is not None
    assert [row["id"] for row in scene.daemon.client.incidents(kind="lost")] == [None]
    (state / "other").unlink()
    wait_until(lambda: scene.daemon.client.incidents(kind="lost")[0]["id"], what="there is room, and it is stored")
    return Said(f"{said.words.replace(str(scene.home), '…')}; still: {reported.words}", said.seconds, reported.lost)


@fault("The log's disk is full", "hookd serve 2>/dev/full")
def log_full(scene: Scene) -> Said:
    return _deaf(scene, 'exec "$@" 2>/dev/full', 20)


@fault("Nobody reads the log", "hookd serve 2> >(sleep 600), and more lines than the pipe holds")
def log_stuck(scene: Scene) -> Said:
    return _deaf(scene, 'exec "$@" 2> >(exec sleep 600)', 600)


def _deaf(scene: Scene, how: str, targets: int) -> Said:
    scene.serve("--linger-s", "1", around=("bash", "-c", how, "hookd"))
    herd = scene.herd()
    pids = herd.start(targets, "job")
    wait_until(lambda: _served(scene) == set(pids), what="discovery")
    herd.end(pids, "exit")
    scene.now()
    return scene.shows("hookd_scrape_duration_seconds ", lost="lines of the log; metrics and incidents go on")


@fault("The incident database is overwritten", "100 kB of noise over incidents.sqlite, then hookd serve")
def database_corrupt(scene: Scene) -> Said:
    state = scene.home / "state"
    state.mkdir()
    (state / "incidents.sqlite").write_bytes(b"noise" * 20_000)
    scene.now()
    scene.serve()
    said = scene.hears(
        r"(WARNING|ERROR): .*incident", lost="nothing that could be saved: the file is kept, and a new one begins"
    )
    return Said(said.words.replace(str(scene.home), "…"), said.seconds, said.lost)


@fault("The wall clock is set ten years ahead, then ten back", "time.time() of the daemon is moved")
def clock(scene: Scene) -> Said:
    file = scene.home / "offset"
    file.write_text("0")
    (scene.home / "sitecustomize.py").write_text(OFFSET.format(file=str(file)))
    scene.serve(PYTHONPATH=_path(scene.home))
    herd = scene.herd()
    pids = herd.start(3, "job")
    wait_until(lambda: _served(scene) == set(pids), what="discovery")
    before = _counters(scene.daemon.metrics())
    for years in (10, -10):
        scene.now()
        file.write_text(str(years * 365 * 86400))
        (new,) = herd.start(1, "job")
        wait_until(lambda new=new: new in _served(scene), what="one more target")
        after = _counters(scene.daemon.metrics())
        assert all(after[key] >= value for key, value in before.items())
    assert not any("lost in process" in line for line in scene.daemon.process.err)
    return Said(
        "(nothing: no target is lost, no counter falls, new targets are found)",
        scene.elapsed(),
        "nothing; only what is logged bears the wrong time",
    )


def _path(first: Path) -> str:
    return ":".join(map(str, (first, REPOSITORY, REPOSITORY / "plugins")))


@fault("The daemon runs out of descriptors", "prlimit --nofile=64 of `hookd serve` with 30 targets")
def descriptors(scene: Scene) -> Said:
    daemon: Daemon = scene.serve()
    psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_NOFILE, (64, 64))
    herd = scene.herd()
    scene.now()
    pids = set(herd.start(30, "job"))
    said = scene.hears("may open 64 files", lost="")
    first = _served(scene)
    herd.end(sorted(first), "exit")
    wait_until(lambda: pids - first <= _served(scene) or None, what="the rest")
    assert re.search("hookd_target_up", daemon.get("/metrics"))
    return Said(said.words, said.seconds, "series of those without room, until others end; the others go on")
