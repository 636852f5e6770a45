"""Reads that never end, because a target's memory is backed by files of a file system that its user serves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.attacks.attack import ATTACKER, VICTIM, Impossible, Result, attack
from tests.attacks.fairness import _is_served, attach_by_rule, serving, training
from tests.attacks.people import folder_of, of_users, process_of, python_of_users
from tests.support.environment import tool_environment
from tests.support.processes import PATIENCE_S, Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon import Daemon

PROGRAM = Path(__file__).with_name("programs") / "silent_files.py"
PAIR = PROGRAM.with_name("pair_of_files.py")
MNT_FORCE, MNT_DETACH = 1, 2
ADDRESS = "127.0.0.1:9464"
WITHIN_S = 20.0
"""How soon another user's job must be served, and the daemon must have ended, even on a busy machine."""
MOST_GROWN = 100e6
"""Bytes by which the daemon's memory may grow."""


@contextlib.contextmanager
def silent_files(uid: int) -> Iterator[tuple[int, Path]]:
    """Mount a file system that a user serves, as fusermount does; yield its server's descriptor, and where it is mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    with folder_of(uid) as folder, contextlib.ExitStack() as stack:
        try:
            fd = os.open("/dev/fuse", os.O_RDWR)
        except OSError as exc:
            raise Impossible(f"/dev/fuse: {exc.strerror}") from exc
        stack.callback(os.close, fd)
        place = folder / "files"
        place.mkdir()
        how = f"fd={fd},rootmode=40000,user_id={uid},group_id={uid}"
        if libc.mount(b"silent", bytes(place), b"fuse", 6, how.encode()):  # nosuid, nodev
            raise Impossible(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
        stack.callback(libc.umount2, bytes(place), MNT_DETACH)
        stack.callback(release, place)
        yield fd, place


def release(place: Path) -> None:
    """Abort the connection to the server of such a file system: every process that waits for it gets an error."""
    ctypes.CDLL(None).umount2(bytes(place), MNT_FORCE)


@contextlib.contextmanager
def silent_processes(uid: int, count: int) -> Iterator[Process]:
    """Start processes of a user that ask for hookd, and whose interpreter nobody can read."""
    with silent_files(uid) as (fd, place):
        library = place.parent / "libtorch_stub.so"
        library.write_bytes(bytes(4096))
        command = [python_of_users(), "-S", PROGRAM, str(fd), place, library]
        with process_of(uid, command, pass_fds=(fd,), HOOKD="1", **of_users()) as parent:
            parent.expect("^ready$")
            parent.ask(str(count), f"^{count}$")
            yield parent


def _restart_s(daemon: Daemon) -> tuple[float, float]:
    """End a daemon and start the next one on its port; return the seconds until the end, and until the next one was ready."""
    begun = time.monotonic()
    daemon.process.signal(signal.SIGTERM)
    daemon.process.wait()
    end_s = time.monotonic() - begun
    with serving("--listen", ADDRESS):
        return end_s, time.monotonic() - begun


@attack(
    "another user",
    "Two users' processes whose libraries lie in files that are never read to their end: hookd waits in the kernel and can "
    "neither serve others nor be restarted",
    tries=20,
    short=5,
    is_long=True,
)  # fmt: skip
def memory_never_read(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        by_rule, asked_for = (stack.enter_context(training(VICTIM)) for _ in range(2))
        for job in (by_rule, asked_for):
            job.expect("^ready$")
        for uid in (ATTACKER, ATTACKER + 1):
            stack.enter_context(silent_processes(uid, count))
        with serving("--listen", ADDRESS) as daemon:
            wait_until(lambda: daemon.metrics().total("hookd_attach_total", result="unreadable"), what="the first try")
            begun = time.monotonic()
            by_rule.ask("ask", "^null$")
            daemon.client.attach(asked_for.pid, timeout_s=WITHIN_S)
            asked_s = time.monotonic() - begun
            wait_until(lambda: _is_served(daemon, by_rule.pid), what="the attach by rule")
            rule_s = time.monotonic() - begun
            end_s, again_s = _restart_s(daemon)
    late = sum(seconds > WITHIN_S for seconds in (asked_s, rule_s, end_s, again_s))
    seen = (
        f"beside {count} processes of each: attached by rule after {rule_s:.1f} s, as asked after {asked_s:.1f} s; the daemon "
        f"ended within {end_s:.1f} s, and the next one was ready on its port after {again_s:.1f} s"
    )
    return Result(4, late, seen)


@attack(
    "another user",
    "A process that reads a page of its own which never comes, and then maps memory: whoever reads its command line or its "
    "mappings waits, so that no other user's training is found",
    tries=5,
    short=1,
    is_long=True,
)  # fmt: skip
def address_space_locked(count: int) -> Result:
    return _beside("locked.py", count)


def _beside(program: str, count: int) -> Result:
    """Attach by rule to another user's job, beside a user's processes that a program has locked."""
    with _locked(program, count, has_pages=False) as (daemon, job):
        rule_s = attach_by_rule(daemon, job)
        end_s, again_s = _restart_s(daemon)
    seen = (
        f"beside {count}: attached by rule after {rule_s:.1f} s; the daemon ended within {end_s:.1f} s, and the next one was "
        f"ready after {again_s:.1f} s"
    )
    return Result(3, sum(seconds > WITHIN_S for seconds in (rule_s, end_s, again_s)), seen)


@contextlib.contextmanager
def _locked(program: str, count: int, *, has_pages: bool) -> Iterator[tuple[Daemon, Process]]:
    """Start a daemon and locked processes; if they have pages, wait until they are served. Yield the daemon and a job."""
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(training(VICTIM))
        job.expect("^ready$")
        fd, place = stack.enter_context(silent_files(ATTACKER))
        command = [python_of_users(), "-S", PROGRAM.with_name(program), str(fd), place]
        with serving("--listen", ADDRESS) as daemon:
            parent = stack.enter_context(process_of(ATTACKER, command, pass_fds=(fd,), HOOKD="0", **of_users()))
            stack.callback(release, place)  # otherwise its children could not be ended
            parent.expect("^ready$")
            parent.ask(str(count), f"^{count}$")
            if has_pages:
                wait_until(lambda: len(daemon.client.targets()) == count, what="the pages")
                parent.ask("lock", "^lock$")
            yield daemon, job


@attack(
    "another user",
    "Children that let others wait for half a second whenever they are asked what they are, below a parent that is looked at again "
    "and again: each answer comes in time, all of them never do",
    tries=100,
    short=100,
    is_long=True,
)  # fmt: skip
def slow_answers(count: int) -> Result:
    return _beside("slow_answers.py", count)


@attack(
    "another user",
    "Targets that never end to become another program, so that whoever opens their mappings, or asks what their descriptors are, "
    "waits: no other user's training is found, and no other's counters are served",
    tries=5,
    short=1,
    is_long=True,
)  # fmt: skip
def exec_without_end(count: int) -> Result:
    with _locked("endless_exec.py", count, has_pages=True) as (daemon, job):
        begun = time.monotonic()
        daemon.metrics()
        scrape_s = time.monotonic() - begun
        rule_s = attach_by_rule(daemon, job)
        steps = _steps(daemon, job)
        wait_until(lambda: _steps(daemon, job) > steps, what="the job's steps")
        steps_s = time.monotonic() - begun
        end_s, again_s = _restart_s(daemon)
    seen = (
        f"beside {count} that were served: a scrape took {scrape_s:.1f} s; another user's was attached by rule after "
        f"{rule_s:.1f} s, and its steps were served after {steps_s:.1f} s; the daemon ended within {end_s:.1f} s, and the next one "
        f"was ready after {again_s:.1f} s"
    )
    return Result(5, sum(seconds > WITHIN_S for seconds in (scrape_s, rule_s, steps_s, end_s, again_s)), seen)


def _steps(daemon: Daemon, job: Process) -> float:
    run = next((row["run"] for row in daemon.client.targets() if row["pid"] == job.pid), "")
    return daemon.metrics().total("hookd_steps_total", run=run)


@attack(
    "another user",
    "Processes with command lines of 520,000 words that change their size all the time, to slow the search and fill the memory",
    tries=25,
    short=8,
    is_long=True,
)  # fmt: skip
def command_lines_without_end(count: int) -> Result:
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(training(VICTIM))
        job.expect("^ready$")
        daemon = stack.enter_context(serving())
        process = psutil.Process(daemon.process.pid)
        before = process.memory_info().rss
        command = [python_of_users(), "-S", PROGRAM.with_name("long_words.py"), str(count)]
        parent = stack.enter_context(process_of(ATTACKER, command, HOOKD="0", **of_users()))
        wait_until(lambda: parent.out.count("on") == count, what="the processes")
        rule_s, grown = attach_by_rule(daemon, job), process.memory_info().rss - before
    wrong = [rule_s > WITHIN_S, grown > MOST_GROWN]
    seen = (
        f"beside {count}: attached by rule after {rule_s:.1f} s; the daemon had {grown / 1e6:.0f} MB more than before"
    )
    return Result(2, sum(wrong), seen)


ASK = """
import collections, sys
from hookd.tool.attach import Control
from hookd.errors import HookdError
answers = collections.Counter()
for _ in range(int(sys.argv[2])):
    try:
        Control.connect(int(sys.argv[1]), 1.0).close()
        answers["reached the process itself"] += 1
    except HookdError as error:
        answers["refused" if error.reason == "gone" else error.reason] += 1
    if answers["unreadable"] >= 4:
        break
print(*(f"{answer}: {count}" for answer, count in sorted(answers.items())), sep=", ")
"""


@attack(
    "another user",
    "exchange an agent's pair of sockets for a file of a file system of one's own, to have root wait for it without end",
    tries=20000,
    short=2000,
    is_long=True,
)
def pair_of_silent_files(tries: int) -> Result:
    with contextlib.ExitStack() as stack:
        fd, place = stack.enter_context(silent_files(ATTACKER))
        command = [python_of_users(), "-S", PAIR, str(fd), place]
        target = stack.enter_context(process_of(ATTACKER, command, pass_fds=(fd,), HOOKD="0", **of_users()))
        target.expect("^ready$")
        asking = stack.enter_context(
            Process([sys.executable, "-c", ASK, str(target.pid), str(tries)], env=tool_environment())
        )
        stack.callback(release, place)  # otherwise it could not be ended
        begun = time.monotonic()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: asking.popen.poll() is not None, timeout_s=PATIENCE_S, what="the end of who asks")
        seconds = time.monotonic() - begun
        is_stuck = asking.popen.poll() is None
        said = "it waits in the kernel" if is_stuck else f"it ended after {seconds:.1f} s; {''.join(asking.out)}"
    return Result(tries, int(is_stuck), said)
