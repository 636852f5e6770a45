"""Daemons that are stopped, doubled or flooded, and targets that another process holds at the moment of an attach."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hookd.errors import HookdError
from hookd.tool.daemon.client import DaemonClient
from hookd.tool.daemon.fleet.fd_budget import PER_USER
from tests.attacks.attack import ATTACKER, VICTIM, Impossible, Result, attack
from tests.attacks.fairness import page_of, serving, training
from tests.attacks.people import of_users, process_of, python_of_users
from tests.support.cgroup import remove
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon import Daemon
    from tests.support.processes import Process

PROGRAMS = Path(__file__).with_name("programs")
SCRAPE_TIMEOUT_S = 10.0
"""The default of Prometheus."""
MOST_MEMORY = 2 << 30
LEASE_S = 3
SOON_S = 5.0
"""How soon the daemon must serve others while an attach hangs."""
FREEZERS = ((Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
            (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"))  # fmt: skip
MEMORY = ((Path("/sys/fs/cgroup/memory"), "memory.usage_in_bytes", "memory.limit_in_bytes"),
          (Path("/sys/fs/cgroup"), "memory.current", "memory.max"))  # fmt: skip


@contextlib.contextmanager
def pages(count: int) -> Iterator[Process]:
    """Start processes of the attacker that hold pages; see `programs/pages.py`."""
    modules = 300 if count >= 5_000 else 30
    command = [python_of_users(), PROGRAMS / "pages.py", str(modules)]
    with process_of(ATTACKER, command, **of_users()) as parent:
        parent.expect("^ready$")
        parent.ask(str(count), f"^{count}$", timeout_s=300)
        yield parent


@attack(
    "another user",
    "Processes with pages of their own, to fill the daemon and every scrape",
    tries=5_000,
    short=500,
    is_long=True,
)
def pages_without_end(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving())
        stack.enter_context(pages(count))
        begun = time.monotonic()
        victim = stack.enter_context(page_of(VICTIM))
        wait_until(lambda: victim.pid in _served(daemon), 120, what="the victim's page")
        found_s = time.monotonic() - begun
        scrapes = []
        for _ in range(5):
            begun = time.monotonic()
            text = daemon.get("/metrics", timeout_s=120)
            scrapes.append(time.monotonic() - begun)
            assert f'pid="{victim.pid}"' in text
        memory = psutil.Process(daemon.process.pid).memory_info().rss
        served = len(_served(daemon)) - 1
    is_slow = max(scrapes) > SCRAPE_TIMEOUT_S or found_s > SCRAPE_TIMEOUT_S
    is_through = is_slow or memory > MOST_MEMORY or served > PER_USER
    seen = (
        f"{served:,} of {count:,} are served; another user's page was found after {found_s:.1f} s, the slowest of "
        f"{len(scrapes)} scrapes took {max(scrapes):.1f} s and {len(text) / 1e6:.1f} MB, the daemon {memory >> 20:,} MiB"
    )
    return Result(count, int(is_through), seen)


def _served(daemon: Daemon) -> set[int]:
    return {row["pid"] for row in daemon.client.targets() if row["state"] == "attached"}


def probe(job: Process) -> dict[str, Any]:
    """Ask a training what it has done, and what hookd has left behind in it."""
    answer: dict[str, Any] = json.loads(job.ask("probe", r"^\{").string)
    return answer


def _ready(job: Process) -> Process:
    job.expect("^ready$")
    return job


def _counted(daemon: Daemon, pid: int) -> float:
    """Return the steps of a process that a daemon serves, or 0 if it serves none."""
    metrics = daemon.metrics()
    info = [one.labels for one in metrics.select("hookd_target_info", pid=str(pid))]
    return metrics.total("hookd_steps_total", run=info[0]["run"], rank=info[0]["rank"]) if info else 0.0


def _missed(daemon: Daemon, job: Process) -> tuple[float, float]:
    """Return the bounds of the number of steps that are missing from the counter of a training."""
    first = probe(job)["steps"]
    counted = _counted(daemon, job.pid)
    return first - counted, probe(job)["steps"] - counted


def _agrees(daemon: Daemon, job: Process, before: tuple[float, float]) -> bool:
    low, high = _missed(daemon, job)
    return low <= before[1] + 1 and high >= before[0] - 1


def _attach(daemon: Daemon, job: Process) -> None:
    daemon.client.attach(job.pid, timeout_s=60)
    wait_until(lambda: _counted(daemon, job.pid) > 5, what="steps")


def _refused(daemon: Daemon, job: Process, timeout_s: float) -> tuple[HookdError | None, float]:
    """Attach where that should fail; return the error, and after how many seconds it came."""
    begun = time.monotonic()
    try:
        daemon.client.attach(job.pid, timeout_s=timeout_s)
    except HookdError as error:
        return error, time.monotonic() - begun
    return None, time.monotonic() - begun


@attack(
    "an accident", "SIGSTOP of the daemon for twice its lease, SIGCONT, and SIGKILL while it is stopped", is_long=True
)
def daemon_stopped(_: int) -> Result:
    wrong = []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving(HOOKD_LEASE_S=str(LEASE_S)))
        job = _ready(stack.enter_context(training(VICTIM)))
        fresh = probe(job)
        _attach(daemon, job)
        missed = _missed(daemon, job)
        (row,) = daemon.client.targets()
        daemon.process.signal(signal.SIGSTOP)
        until, steps = time.monotonic() + 2 * LEASE_S, probe(job)["steps"]
        wait_until(lambda: time.monotonic() > until, what="the end of the lease's time")
        now = probe(job)
        wrong += ["the training stood"] * (now["steps"] <= steps) + ["the agent has left"] * (not now["is_watched"])
        daemon.process.signal(signal.SIGCONT)
        (again,) = daemon.client.targets()
        wrong += ["it was attached to again"] * ((again["attached"], again["run"]) != (row["attached"], row["run"]))
        wrong += ["the counters differ"] * (not _agrees(daemon, job, missed))
        wrong += ["more attaches"] * (daemon.metrics().total("hookd_attach_total") != 1)
        daemon.process.signal(signal.SIGSTOP)
        daemon.process.signal(signal.SIGKILL)
        wait_until(lambda: not (now := probe(job))["is_watched"] and not now["pages"], what="the agent to leave")
        wrong += ["threads are left"] * (probe(job)["threads"] != fresh["threads"])
    seen = "the agent stays while its lease is open and leaves after it; no step was lost, none counted twice"
    return Result(1, int(bool(wrong)), ", ".join(wrong) or seen)


@contextlib.contextmanager
def _serving_as(uid: int) -> Iterator[DaemonClient]:
    """Start `hookd serve` as a user."""
    with tempfile.TemporaryDirectory(prefix="attack-") as home:
        os.chown(home, uid, uid)
        control = Path(home) / "control.sock"
        state = ("--state-dir", Path(home) / "state", "--control", control, "--listen", "127.0.0.1:0")
        command = [python_of_users(), "-m", "hookd", "serve", *state]
        with process_of(uid, command, **of_users(), HOOKD_LEASE_S=str(LEASE_S)) as process:
            process.expect(" serves ")
            yield DaemonClient(control)


@attack(
    "an accident",
    "Three daemons whose rules take the same processes at one moment, two of root and one of the user",
    tries=5,
    short=1,
    is_long=True,
)
def daemons_at_once(count: int) -> Result:
    wrong = []
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(serving()) for _ in range(2))
        third = stack.enter_context(_serving_as(VICTIM))
        jobs = [stack.enter_context(training(VICTIM)) for _ in range(count)]
        for job in map(_ready, jobs):
            job.ask("ask", "^null$")
        pids = {job.pid for job in jobs}
        for client in (first.client, second.client, third):
            wait_until(lambda client=client: pids <= {row["pid"] for row in client.targets()}, what="all to serve it")  # type: ignore[misc]
        for job in jobs:
            wait_until(lambda job=job: _counted(first, job.pid) > 5, what="steps")  # type: ignore[misc]
            missed = _missed(first, job)
            found = probe(job)
            wrong += [f"{found['pages']} pages"] * (found["pages"] != 1)
            wrong += ["the counters differ"] * (not _agrees(second, job, missed))
        for client in (first.client, second.client, third):
            names = {row["pid"]: row["run"] for row in client.targets()}
            wrong += [f"they are named {names}"] * (len(set(names.values())) != count)
    seen = "one agent in each, the same counters in all daemons, and no name twice in one"
    return Result(count, int(bool(wrong)), ", ".join(wrong) or seen)


@contextlib.contextmanager
def _tracer(name: str, pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """Trace a process with gdb or strace; gdb keeps it stopped."""
    quick = ("-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off")  # torch's symbols take minutes
    command = {"strace": ["strace", "-f", "-qq", "-o", "/dev/null"], "gdb": ["gdb", "-nx", "-q", *quick]}[name]
    try:
        tracer = subprocess.Popen(
            [*command, "-p", str(pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError as exc:
        raise Impossible(f"{name} is not installed") from exc
    with tracer:
        try:
            wait_until(lambda: f"TracerPid:\t{tracer.pid}\n" in Path(f"/proc/{pid}/status").read_text(), what=name)
            yield tracer
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracer.send_signal(signal.SIGINT if name == "strace" else 0)
                tracer.communicate(b"detach\nquit\n", 20)
            tracer.kill()
            os.kill(pid, signal.SIGCONT)  # a tracer that is killed may leave it stopped


def _goes_on(job: Process, timeout_s: float = 60.0) -> None:
    steps = probe(job)["steps"]
    wait_until(lambda: probe(job)["steps"] > steps + 20, timeout_s, what="steps")


def _traced(job: Process, daemon: Daemon, name: str) -> Iterator[str]:
    """Try to attach while a tracer holds the training, attach after it, then trace again; yield what is wrong."""
    with _tracer(name, job.pid) as tracer:
        error, seconds = _refused(daemon, job, 10.0)
        words = "" if error is None else error.message
        if f"is traced by process {tracer.pid} ({name})" not in words or seconds > SOON_S:
            yield f"{name}: after {seconds:.1f} s: {words}"
    _attach(daemon, job)
    missed = _missed(daemon, job)
    with _tracer(name, job.pid):
        if name == "strace":
            _goes_on(job)
    _goes_on(job)
    if not _agrees(daemon, job, missed):
        yield f"{name}: the counters differ"
    daemon.client.detach(job.pid)


@attack(
    "an accident",
    "strace and gdb hold the training at the moment of an attach, or come after it",
    tries=2,
    short=2,
    is_long=True,
)
def traced_by_others(count: int) -> Result:
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving())
        job = _ready(stack.enter_context(training(VICTIM)))
        for name in ("strace", "gdb")[:count]:
            wrong += _traced(job, daemon, name)
        wrong += ["hookd is left"] * probe(job)["is_watched"]
    return Result(
        count,
        len(wrong),
        "; ".join(wrong) or "refused within a second with the tracer's name; attached once it has gone",
    )


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """Freeze a process by means of a cgroup of its own."""
    home, file, frozen, thawed = next((one for one in FREEZERS if one[0].is_dir()), FREEZERS[-1])
    group = home / f"hookd-attack-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / file).write_text(frozen)
    except OSError as exc:
        raise Impossible(f"no cgroup can be frozen: {exc}") from exc
    try:
        yield
    finally:
        (group / file).write_text(thawed)
        (home / "cgroup.procs").write_text(str(pid))
        remove(group)


@contextlib.contextmanager
def _vforking(job: Process) -> Iterator[None]:
    """Keep the main thread in uninterruptible sleep."""
    job.send("block 15")
    wait_until(lambda: "State:\tD" in Path(f"/proc/{job.pid}/status").read_text(), what="state D")
    yield
    wait_until(lambda: "State:\tD" not in Path(f"/proc/{job.pid}/status").read_text(), what="the end of state D")


@attack(
    "an accident",
    "A main thread that cannot be stopped (parent of a vfork, frozen cgroup) at the moment of an attach",
    tries=2,
    short=2,
    is_long=True,
)
def never_stops(count: int) -> Result:
    wrong, seen = [], []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving())
        stuck, other = (stack.enter_context(training(VICTIM)) for _ in range(2))
        _ready(stuck), _ready(other)
        begun = time.monotonic()
        daemon.client.attach(other.pid, timeout_s=30)
        usual_s = time.monotonic() - begun
        daemon.client.detach(other.pid)
        for hold in (_vforking, lambda job: _frozen(job.pid))[:count]:
            with hold(stuck):
                answers: list[tuple[HookdError | None, float]] = []
                asking = threading.Thread(target=lambda: answers.append(_refused(daemon, stuck, 3.0)))  # noqa: B023
                asking.start()
                begun = time.monotonic()
                daemon.client.attach(other.pid, timeout_s=30)
                daemon.metrics()
                served_s = time.monotonic() - begun
                asking.join(60)
                ((error, seconds),) = answers
            daemon.client.detach(other.pid)
            _goes_on(stuck)
            _attach(daemon, stuck)
            daemon.client.detach(stuck.pid)
            wrong += [f"after {seconds:.1f} s: {error}"] * (error is None or seconds > 3.0 + SOON_S)
            wrong += [f"the other waited {served_s:.1f} s"] * (served_s > 2 * usual_s + SOON_S)
            seen.append(
                f"{error.reason if error else '-'} after {seconds:.1f} s, another attach took {served_s:.1f} s, {usual_s:.1f} s otherwise"
            )
    return Result(count, len(wrong), "; ".join(wrong or seen))


UNTOUCHED = ("no-memory", "zombie", "no-such-process")
"""Reasons found by `hookd.tool.attach.target.inspect`, which ends before anything of the process is touched."""


@contextlib.contextmanager
def _memory_left(pid: int, left: int) -> Iterator[Path]:
    """Yield a cgroup in which a process may use so many bytes of memory more than it does now."""
    home, usage, limit = next((one for one in MEMORY if (one[0] / one[1]).exists() or one is MEMORY[-1]), MEMORY[-1])
    group = home / f"hookd-attack-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / limit).write_text(str(int((group / usage).read_text()) + left))
    except OSError as exc:
        raise Impossible(f"no cgroup limits memory: {exc}") from exc
    try:
        yield group
    finally:
        remove(group)


@attack(
    "an accident",
    "A training whose memory cgroup has next to nothing left at the moment of an attach",
    tries=7,
    short=3,
    is_long=True,
)
def no_memory_left(count: int) -> Result:
    reported, killed = [], 0
    with serving() as daemon:
        for left in (1 << 20, 50 << 20, 0, 8 << 20, 16 << 20, 32 << 20, 64 << 20)[:count]:
            with contextlib.ExitStack() as stack:
                job = stack.enter_context(training(VICTIM))
                stack.enter_context(_memory_left(_ready(job).pid, left))
                stack.callback(job.close)
                with contextlib.suppress(AssertionError, OSError):
                    _goes_on(job)
                if job.popen.poll() is not None:  # without any attach
                    reported.append(f"{left >> 20} MiB: not tried, it needed more itself")
                    continue
                error, _ = _refused(daemon, job, 20.0)
                with contextlib.suppress(AssertionError, OSError):
                    _goes_on(job)
                is_dead, said = job.popen.poll() is not None, error.reason if error else "attached"
                killed += is_dead and said not in UNTOUCHED
                reported.append(f"{left >> 20} MiB: {said}{', then killed' * is_dead}")
    return Result(count, killed, "with " + ", ".join(reported))
