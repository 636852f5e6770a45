"""Accidents that nobody intends: a disk that is full, read-only or damaged, clocks that jump, a daemon killed or starved."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.attacks.attack import Impossible, Result, attack
from tests.support import prometheus
from tests.support.cgroup import limited
from tests.support.daemon import Daemon, tell
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.herd import Herd
from tests.support.processes import Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLDER = REPOSITORY / "tests" / "support" / "page_holder.py"
HOUR_S = 3600
BAD_DISK = "incidents cannot be stored in .*; they stay in memory until they can: free space there"
OFFSET = """
import time
real = time.time
def moved():
    with open({file!r}) as file:
        return real() + float(file.read() or 0)
time.time = moved
"""


@dataclass
class Scene:
    """A daemon with its state on a disk of its own."""

    stack: contextlib.ExitStack
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def disk(self, megabytes: int) -> None:
        """Put the state on a small disk of its own."""
        self.state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,size={megabytes}m", "tmpfs", self.state], check=True)
        self.stack.callback(subprocess.run, ["umount", "-l", self.state], check=True)

    def serve(self, *arguments: str, **more: object) -> Daemon:
        daemon = Daemon(self.folder, *arguments, **more)
        self.stack.callback(daemon.process.close)
        return daemon

    def hold(self, run: str = "job") -> Process:
        command = [sys.executable, HOLDER, f'{{"run": "{run}"}}']
        holder = self.stack.enter_context(Process(command, env=tool_environment(), stdin=True))
        holder.expect("^ready$")
        return holder

    def herd(self) -> Herd:
        herd = Herd()
        self.stack.callback(herd.close)
        return herd


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accident-"))))


def _served(daemon: Daemon) -> set[int]:
    return {row["pid"] for row in daemon.client.targets() if row["state"] == "attached"}


# ---- the disk


def _incidents(begin: int, count: int) -> list[str]:
    return [f"layer {chr(ord('a') + n)} is dead" for n in range(begin, begin + count)]


def _on_a_bad_disk(made: Scene, spoil: Callable[[Daemon], Daemon], mend: Callable[[], None]) -> list[str]:
    """Send incidents before, while and after the disk is bad; return what went wrong.

    Args:
        made: the daemon, and its disk.
        spoil: makes the disk bad, and returns the daemon that serves from then on.
        mend: makes the disk good again.
    """
    holder, daemon = made.hold(), made.serve()
    wait_until(lambda: holder.pid in _served(daemon), what="discovery")

    def reported(begin: int, *, is_stored: bool) -> bool:
        for text in _incidents(begin, 3):
            tell(holder, incident={"kind": "dead", "message": text})
        rows = lambda: daemon.client.incidents(run="job")  # noqa: E731
        wanted = set(_incidents(0, begin + 3))
        with contextlib.suppress(AssertionError):
            return wait_until(
                lambda: wanted <= {row["message"] for row in rows() if row["id"] is not None or not is_stored}, 10
            )
        return False

    bad = [] if reported(0, is_stored=True) else ["nothing is stored at first"]
    daemon = spoil(daemon)
    bad += [] if reported(3, is_stored=False) else ["incidents are missing while the disk is bad"]
    bad += [] if "hookd_target_up" in daemon.get("/metrics") else ["/metrics is not served"]
    daemon.process.expect(BAD_DISK)
    mend()
    bad += [] if reported(6, is_stored=True) else ["not all incidents are stored when the disk is good again"]
    lines = [line for line in daemon.process.err if re.search(BAD_DISK, line)]
    return bad + [f"it is said {len(lines)} times"] * (len(lines) != 1)


@attack("an accident", "The disk of the state directory fills up while incidents are reported, and has room again")
def disk_fills_up(tries: int) -> Result:
    with scene() as made:
        made.disk(2)
        other = made.state / "other"

        def fill(daemon: Daemon) -> Daemon:
            with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            return daemon

        bad = _on_a_bad_disk(made, fill, other.unlink)
    return Result(tries, len(bad), "; ".join(bad) or "said once; nothing is lost, and all is stored once there is room")


@attack(
    "an accident", "A daemon is started on a disk that is read-only, with a store on it; then it can be written again"
)
def disk_is_read_only(tries: int) -> Result:
    with scene() as made:
        made.disk(4)

        def remount(how: str) -> None:
            subprocess.run(["mount", "-o", f"remount,{how}", made.state], check=True)

        def again(daemon: Daemon) -> Daemon:
            daemon.process.signal(signal.SIGTERM)
            daemon.process.wait()
            remount("ro")
            return made.serve()

        bad = _on_a_bad_disk(made, again, lambda: remount("rw"))
    return Result(
        tries, len(bad), "; ".join(bad) or "said once; what is stored is listed, and all is stored in the end"
    )


@attack("an accident", "Noise is written over the middle of the incident store and its log while a daemon uses them")
def store_is_overwritten(tries: int) -> Result:
    with scene() as made:
        made.disk(16)

        def overwrite() -> None:
            for name in ("incidents.sqlite", "incidents.sqlite-wal"):
                path = made.state / name
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.seek(size // 2 >> 12 << 12)
                    file.write(os.urandom(min(8192, size)))

        holder, daemon = made.hold(), made.serve()
        wait_until(lambda: holder.pid in _served(daemon), what="discovery")
        texts = [f"layer {chr(97 + a)}{chr(97 + b)} is dead {'x' * 900}" for a in range(4) for b in range(24)]
        for text in texts:
            tell(holder, incident={"kind": "dead", "message": text})
        rows = lambda: daemon.client.incidents(run="job", limit=1000)  # noqa: E731
        wait_until(lambda: len([one for one in rows() if one["id"]]) == len(texts), what="the first reports")
        daemon.process.signal(signal.SIGTERM)
        daemon.process.wait()
        before = made.serve()
        overwrite()
        tell(holder, incident={"kind": "dead", "message": "after the noise"})
        wait_until(lambda: any(one["message"] == "after the noise" for one in before.client.incidents(limit=1000)), 10,
                   what="the reports after the noise")  # fmt: skip
        before.process.signal(signal.SIGTERM)
        before.process.wait()
        after = made.serve()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: list(made.state.glob("*.corrupt-*")), 10, what="the damage is noticed")
        saved = 0

        def is_whole() -> bool:  # what a page still holds is stored at the next look at it
            nonlocal saved
            saved = len({one["message"] for one in after.client.incidents(limit=1000)} & set(texts))
            return saved == len(texts)

        with contextlib.suppress(AssertionError):
            wait_until(is_whole, 10, what="all incidents")
        bad = ["/metrics is not served"] * ("hookd_target_up" not in after.get("/metrics"))
        bad += [f"only {saved} of {len(texts)} incidents are left"] * (saved < len(texts))
        said = [line for one in (before, after) for line in one.process.err if "is damaged" in line]
        bad += ["it is not said"] * (not said)
        reported = re.search(r"begins with the (\d+) incidents", "\n".join(said))
    seen = (
        f"{saved} of {len(texts)} incidents are left: {reported[1] if reported else 'none'} could be read, the rest is on the page of"
        " their target; the damaged file is kept"
    )
    return Result(tries, len(bad), "; ".join([*bad, seen]))


# ---- clocks


@attack("an accident", "The wall clock of the daemon jumps two hours ahead, then four back", is_long=True)
def wall_clock_jumps(tries: int) -> Result:
    with scene() as made:
        file = made.folder / "offset"
        file.write_text("0")
        (made.folder / "sitecustomize.py").write_text(OFFSET.format(file=str(file)))
        path = os.pathsep.join(map(str, (made.folder, REPOSITORY, REPOSITORY / "plugins")))
        daemon = made.serve(PYTHONPATH=path, HOOKD_HANG_AFTER_S="5")
        pids = set(made.herd().start(3, "job"))
        wait_until(lambda: _served(daemon) == pids, what="discovery")
        bad: list[str] = []

        def rates() -> list[float]:
            page = daemon.get("/")
            rows = re.findall(r'<a href="/run/job[^<]*</a></th>(.*?)</tr>', page, re.DOTALL)
            cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
            return [float(row[5]) for row in cells if re.fullmatch(r"[\d.]+(e[+-]\d+)?", row[5])]

        def as_they_are() -> bool:
            found = rates()
            return len(found) == 3 and all(1.2 < one < 2.8 for one in found)

        wait_until(as_they_are, 30, what=lambda: f"steps a second before: {rates()}")
        for hours in (2, -2):
            file.write_text(str(hours * HOUR_S))
            begun = time.monotonic()
            while time.monotonic() - begun < 3:
                if not as_they_are():
                    bad.append(f"steps a second are {rates()} after a jump to {hours} h")
                    break
                time.sleep(0.2)
            if _served(daemon) != pids:
                bad.append("targets are missing")
        lines = [line for line in daemon.process.err if re.search(r"hang in|lost in", line)]
        bad += [f"it says: {line}" for line in lines]
    return Result(
        tries, len(bad), "; ".join(bad) or "steps a second stay as they are; no target is lost or taken to hang"
    )


@attack(
    "an accident",
    "The monotonic clock of the daemon stands ten hours from that of its targets (a time namespace)",
    is_long=True,
)
def daemon_in_a_time_namespace(tries: int) -> Result:
    with scene() as made:
        herd = made.herd()
        pids = set(herd.start(3, "job"))
        bad: list[str] = []
        for offset in ("36000", "0"):
            apart = ("unshare", "--time", "--monotonic", offset, "--boottime", offset, "--fork", "--kill-child")
            try:
                daemon = made.serve(around=apart, HOOKD_HANG_AFTER_S="3")
            except AssertionError as exc:
                raise Impossible(f"no time namespace: {str(exc).splitlines()[-1]}") from exc
            wait_until(lambda daemon=daemon: _served(daemon) == pids, what="discovery")
            end = time.monotonic() + 4  # beyond the time after which a target counts as hanging
            while time.monotonic() < end:
                time.sleep(0.2)
            bad += [f"{offset}: targets are missing"] * (_served(daemon) != pids)
            bad += [f"{offset}: {line}" for line in daemon.process.err if re.search("hang in|lost in|corrupt in", line)]
            daemon.process.signal(signal.SIGKILL)
            daemon.process.wait()
        (dying, *_) = pids
        herd.end([dying], "kill")
        daemon = made.serve()
        daemon.process.expect(rf"lost in process {dying} ")
        lost = [line for line in daemon.process.err if "lost in process" in line]
        bad += ["a target that lives is reported as lost"] * (len(lost) != 1)
    return Result(
        tries,
        len(bad),
        "; ".join(bad) or "all are served, none is taken to hang; the next daemon tells the one that died",
    )


# ---- the daemon itself


@attack(
    "an accident",
    "A daemon of 20 targets is killed, started again, ended and started again, as Prometheus sees it",
    is_long=True,
)
def restarts_under_prometheus(tries: int) -> Result:
    if not prometheus.is_there():
        raise Impossible("Prometheus is not installed (Debian: apt install prometheus)")
    with scene() as made, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        pids = set(made.herd().start(20, "job"))
        listen = ("--listen", f"127.0.0.1:{port}")
        daemon = made.serve(*listen)
        wait_until(lambda: _served(daemon) == pids, what="discovery")
        server = prometheus.started(made.stack, made.folder / "prometheus", daemon.url)
        begun = time.monotonic()

        def scraped(count: int) -> None:
            query = "min(count_over_time(hookd_steps_total[10m]))"
            wait_until(lambda: (server.value(query) or 0) >= count, what=f"{count} scrapes of each")

        scraped(3)
        for number, count in ((signal.SIGKILL, 7), (signal.SIGTERM, 11)):
            daemon.process.signal(number)
            daemon.process.wait()
            daemon = made.serve(*listen)
            scraped(count)
        spent = time.monotonic() - begun
        growing = '{__name__=~"hookd_.*(_total|_count|_sum|_bucket)",__name__!~"hookd_attach.*"}'
        names = [labels["__name__"] for labels, _ in server.query(f"count by (__name__) ({growing})")]
        resets = [(name, labels) for name in names for labels, _ in server.query(f"resets({name}[10m]) > 0")]
        series = server.value(f"count({growing})")
        steps = server.query("max_over_time(hookd_steps_total[10m]) - min_over_time(hookd_steps_total[10m])")
        grown = server.query("increase(hookd_steps_total[10m])")
        true = dict(_by_run(steps))
        wrong = [run for run, value in _by_run(grown) if not 0.9 * true[run] <= value <= 1.6 * true[run] + 4]
        bad = [f"resets of {resets[:2]}"] * bool(resets)
        bad += [f"{len(true)} targets are seen"] * (len(true) != 20)
        bad += [f"the increase of {wrong[:2]} is wrong"] * bool(wrong)
        # A step a second; the first and the last scrape are up to an interval of half a second away from the ends.
        slow = {run: value for run, value in true.items() if value < spent - 1}
        bad += [f"steps do not grow: {slow} in {spent:.0f} s"] * bool(slow)
    seen = f"{series:.0f} counters of 20 targets in {spent:.0f} s: {len(resets)} with a reset, and increase() is right"
    return Result(tries, len(bad), "; ".join([*bad, seen]))


def _by_run(found: list[tuple[dict[str, str], float]]) -> list[tuple[str, float]]:
    return [(labels["run"], value) for labels, value in found]


def _limit(file: Path, size: int) -> None:
    """Limit the memory of a cgroup; raise the limit a little if its processes already use more than was measured (EBUSY)."""
    for more in range(0, 64 << 20, 1 << 20):
        with contextlib.suppress(OSError):
            file.write_text(str(size + more))
            return
    raise Impossible(f"{file} takes no limit near {size}")


@attack("an accident", "The daemon reaches the limit of its memory cgroup")
def daemon_without_memory(tries: int) -> Result:
    with scene() as made, contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(limited(1 << 40))
        except pytest.skip.Exception as exc:
            raise Impossible(str(exc)) from exc
        herd, holder = made.herd(), made.hold("reported")
        pids = {holder.pid, *herd.start(10, "job")}
        daemon = made.serve(around=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "in-a-cgroup"))
        wait_until(lambda: _served(daemon) == pids, what="discovery")
        tell(holder, incident={"kind": "nan", "message": "before"})
        wait_until(
            lambda: [row["id"] for row in daemon.client.incidents(run="reported")] not in ([], [None]), what="a row"
        )
        process = psutil.Process(daemon.process.pid)
        own = sum(one.memory_full_info().uss for one in (process, *process.children()))
        limit = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := group / name).exists())
        _limit(limit, own + (1 << 20))
        pids |= set(herd.start(60, "more"))
        with contextlib.suppress(OSError, AssertionError):
            wait_until(lambda: daemon.get("/metrics") and daemon.process.popen.poll() is not None, 10)
        ended = daemon.process.popen.poll()
        if ended is None:
            daemon.process.signal(signal.SIGKILL)
        daemon.process.wait()
        gone = [pid for pid in pids if not psutil.pid_exists(pid)]
        again = made.serve()
        wait_until(lambda: pids <= _served(again), what="all targets at the next daemon")
        bad = [f"{len(gone)} targets are gone"] * bool(gone)
        bad += ["an incident is lost"] * (
            "before" not in {row["message"] for row in again.client.incidents(run="reported")}
        )
        bad += ["a target is reported as lost"] * any("lost in" in line for line in again.process.err)
    how = "it goes on" if ended is None else f"the kernel ends it (status {ended})"
    seen = f"with {own >> 20} MiB, {how}; {len(pids)} targets go on, and the next daemon serves all and has what was stored"
    return Result(tries, len(bad), "; ".join([*bad, seen]))
