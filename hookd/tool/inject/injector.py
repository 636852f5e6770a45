"""The injector: a separate process that stops the target for a moment, does one job and ends.

It is a separate process so that the death of the tool, Ctrl-C or garbage collection cannot interrupt the stop, and so that
giving up is simple: when it exits, the kernel releases the target. It reads one line of JSON, the job, from stdin and answers
with one line on stdout. All modules are loaded before it reads the job. `helper.py` starts it with only hookd's own package
importable, so it imports only the standard library and hookd.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from hookd.errors import AttachError, HookdError, TargetUnsupported, worded
from hookd.tool.inject import mailbox, ptrace, queued_source, seccomp, selftest
from hookd.tool.inject.interpreter import EVALUATE, GIL_CHECK, GIL_GIVE, GIL_TAKE, INITIALIZED, QUEUE
from hookd.tool.linux import proc
from hookd.tool.linux.memory import Memory
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    from collections.abc import Iterator

_MLOCK_NOW = 1
_DIRECT_EVENTS = 4 * ptrace.MOST_EVENTS
"""More events than usual: a thread that waits for the GIL wakes up every 5 ms (Python/ceval_gil.c), and the code that runs makes
system calls."""
RTTIME_US = 100_000
"""Limit of processor time at real-time priority, in µs. A stop takes 0.3 ms of the injector's processor time."""


@dataclass(frozen=True)
class Job:
    """One injection.

    Attributes:
        ticks: start time of the process, to detect a reused pid.
        program: see `proc.program`; the symbols are valid for this program only.
        memory: descriptor of its memory, inherited from the tool.
        code: Python source with @BOX@ in place of the mailbox's address.
        box: address of the mailbox, 0 to create one.
        size: of the mailbox, in bytes.
        is_filtered: whether the process has seccomp filters, which must be checked for calls that would kill it.
        direct: run the code at once, on a thread that is known to hang outside the interpreter.
    """

    pid: int
    ticks: int
    program: str
    memory: int
    symbols: dict[str, int]
    returns: tuple[int, int]
    code: str
    token: int
    size: int
    timeout_s: float
    box: int = 0
    is_filtered: bool = False
    direct: bool = False


class Stopped(TypedDict):
    """The outcome of a job."""

    box: int
    """The address of the mailbox."""
    pause_s: float
    """The seconds for which the thread was stopped."""


class Failed(TypedDict, total=False):
    """The error of a job, for the tool to raise again."""

    kind: str
    """The name of its class."""
    message: str
    errno: int
    """Of an OSError, which has neither of the others."""
    reason: str
    hint: str


def run(job: Job) -> Stopped:
    """Run the job.

    Raises:
        HookdError: the job failed; nothing was changed in the target.
        OSError: EPERM or ENOSYS from ptrace, for the tool to explain.
    """
    selftest.check()
    text = queued_source.statement(job.code)
    check_ns = _require_mercy(job) if job.is_filtered and not job.box else 0
    memory = Memory(job.pid, job.memory)
    thread = ptrace.thread(memory, job.returns)
    proc.require_alive(job.pid, job.ticks)
    with ahead_of_others():
        thread.stop(job.timeout_s)
        try:
            proc.require_program(job.pid, job.program)  # while stopped the thread cannot change its program, only die
            box = _operate(thread, memory, job, text)
        finally:
            thread.release()
    return {"box": box, "pause_s": (check_ns + thread.released_ns - thread.stopped_ns) / 1e9}


def _require_mercy(job: Job) -> int:
    """Check, in a separate stop, that no filter would kill the process; return the stop's duration in ns."""
    thread = ptrace.thread(Memory(job.pid, job.memory), job.returns)
    with ahead_of_others():
        thread.stop(job.timeout_s)
        try:
            programs = seccomp.filters(job.pid)
        finally:
            thread.release()
    if names := seccomp.deadly(programs, platform.machine()):
        raise TargetUnsupported(
            f"a seccomp filter would end process {job.pid} for {', '.join(names)}", reason="seccomp-kills",
            hint="Let the filter allow that, or answer it with an error (SECCOMP_RET_ERRNO).",
        )  # fmt: skip
    return thread.released_ns - thread.stopped_ns


def _operate(thread: ptrace.Thread, memory: Memory, job: Job, text: bytes) -> int:
    if thread.ask(job.symbols[INITIALIZED]) != 1:
        raise AttachError(
            f"Python is starting or ending in process {job.pid}",
            reason="not-initialized",
            hint="Try again in a moment.",
        )
    if job.box:
        box = mailbox.MemoryBox(memory, job.box)
        if mailbox.word(box, mailbox.STATE) not in mailbox.UNUSED:
            return job.box  # the code has run since the tool checked
        if not job.direct:  # a direct call is complete when it returns: nothing stays queued
            mailbox.set_word(box, mailbox.SENT, mailbox.word(box, mailbox.SENT) + 1)
    else:
        box = mailbox.MemoryBox(memory, thread.map_memory(job.symbols["mmap"], job.size))
        box.write(0, mailbox.opening(job.token, job.size) + queued_source.at_address(text, box.address))
    if job.direct:
        _evaluate(thread, job, box.address + mailbox.CODE)
    else:
        thread.call(job.symbols[QUEUE], job.symbols[EVALUATE], box.address + mailbox.CODE)
    return box.address


def _evaluate(thread: ptrace.Thread, job: Job, code: int) -> None:
    """Run the code on the stopped thread, which hangs outside the interpreter."""
    if thread.ask(job.symbols[GIL_CHECK]) != 0:
        raise AttachError(f"the main thread of process {job.pid} holds the GIL", reason="blocked")
    unlocked, thread.most_events = 1, _DIRECT_EVENTS
    thread.call(job.symbols[GIL_TAKE])
    thread.call(job.symbols[EVALUATE], code)
    thread.call(job.symbols[GIL_GIVE], unlocked)


def harden() -> None:
    """Make this process hard to interrupt: no signals, no garbage collection, no paging."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    gc.disable()
    proc.libc().mlockall(_MLOCK_NOW)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")


@contextlib.contextmanager
def ahead_of_others() -> Iterator[None]:
    """Run at real-time priority for the time of a stop, if that is allowed.

    A target cannot prolong this by prolonging the stop: after RTTIME_US of processor time the kernel sends a signal, whose handler
    sets normal priority, and the stop continues at that. If the handler does not get to run, the kernel kills the injector after
    twice that time. The target survives this as it survives any death of the injector.
    """
    signal.signal(signal.SIGXCPU, _like_others)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_RTTIME, (RTTIME_US, 2 * RTTIME_US))
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        _like_others()


def _like_others(*_: object) -> None:
    with contextlib.suppress(OSError):  # if even this is forbidden, the priority was never raised
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def failure(exc: BaseException) -> Failed:
    """Serialize an error, for the tool to rebuild it."""
    if isinstance(exc, HookdError):
        return {"kind": type(exc).__name__, "message": exc.message, "reason": exc.reason, "hint": exc.hint}
    if isinstance(exc, OSError):
        return {"kind": "OSError", "errno": exc.errno or 0, "message": str(exc)}
    return {
        "kind": "AttachError",
        "message": f"injector: {worded(exc)}",
        "reason": "internal",
        "hint": "",
    }


def main() -> None:
    """Read one job, do it and answer.

    Return if there is no job, because the tool died.
    """
    harden()
    WAITERS.make_calls_here()
    line = sys.stdin.readline()
    if not line:
        return
    try:
        result: Stopped | dict[str, Failed] = run(Job(**json.loads(line)))
    except Exception as exc:  # noqa: BLE001  every error is reported to the tool
        result = {"error": failure(exc)}
    with contextlib.suppress(OSError):  # the tool died; the target is in order
        os.write(1, json.dumps(result).encode())
