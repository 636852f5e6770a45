"""Stop one thread of another process, let it make a few calls, and resume it unchanged.

This runs in the injector. Guarantees of a stop:
- no code is written, no executable memory is created, nothing is allocated on the target's heap;
- all registers and the complete floating point state are restored;
- signals that arrive meanwhile are deferred and sent again (the value that `sigqueue` attached is lost; so is the signal if the
  process belongs to another user and we lack CAP_KILL);
- on x86_64 the target survives the death of the tracer at any moment: see `x86_64.py`;
- the stop ends in bounded time and after a bounded number of events, whatever the target does;
- a thread that becomes another program by exec, which may run as root, is released as it is: nothing is restored there.

Source: ptrace(2); kernel/ptrace.c and kernel/signal.c of Linux 6.18.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import errno
import os
import platform
import signal
import time
from typing import TYPE_CHECKING

from hookd.errors import AttachError, TargetUnsupported
from hookd.tool.linux.proc import libc, lost, status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.tool.linux.memory import Memory

CONT, DETACH, SYSCALL = 7, 17, 24
GETREGSET, SETREGSET, SEIZE, INTERRUPT, GETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A
NT_PRSTATUS = 1
_TRACE_SYSGOOD, _TRACE_EXEC = 1, 1 << 4
_EVENT_EXEC, _EVENT_STOP = 4, 128
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_FAULTS = frozenset(
    {signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGABRT}
)
_SPINS = 100
MOST_EVENTS = 500
"""Stops for a system call or a signal after which the thread is released: the called functions make few."""
GRACE_S = 0.25
"""Time to release the thread after the calls have timed out."""
RIVAL_S = 0.2
"""How long to wait for another tracer to finish: an attach takes 0.4 ms, a sample of py-spy some milliseconds."""


def request(number: int, tid: int, address: int = 0, data: int = 0) -> None:
    """Make one ptrace(2) request.

    Raises:
        OSError: as ptrace(2).
    """
    if libc().ptrace(number, tid, address, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace request {number:#x} on {tid}: {os.strerror(code)}")


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Thread(abc.ABC):
    """The main thread of a process under ptrace.

    The order of use is `stop`, calls, `release`.

    Args:
        memory: of the process.

    Attributes:
        stopped_ns: when the thread was seen stopped, in ns of the monotonic clock.
        released_ns: when it was released, likewise.
        most_events: number of stops after which it is released.
    """

    is_left_in_calls = False
    """Whether a call that has not returned in time may continue, because the thread restores its state by itself."""

    def __init__(self, memory: Memory) -> None:
        self.tid, self._memory = memory.pid, memory
        self.stopped_ns = self.released_ns = 0
        self._seized = self._runs = self._is_late = False
        self._deferred: list[int] = []
        self._until, self._events, self.most_events = 0.0, 0, MOST_EVENTS

    def stop(self, timeout_s: float) -> None:
        """Seize the thread, stop it and save its state.

        Args:
            timeout_s: for this and all calls until `release`, which may take another `GRACE_S`.

        Raises:
            AttachError: reasons "traced", "stopped", "died", "blocked" (it does not stop).
            OSError: EPERM and ENOSYS, for the caller to explain.
        """
        until = time.monotonic() + RIVAL_S
        while (refusal := self._seize()) is not None:
            if time.monotonic() > until:
                raise refusal
            time.sleep(0.001)
        self._until = time.monotonic() + timeout_s
        request(INTERRUPT, self.tid)
        self._wait_for_interrupt()
        self.stopped_ns = time.monotonic_ns()
        self._save()

    def _seize(self) -> AttachError | OSError | None:
        """Seize the thread; return the error if the cause may be another tracer."""
        before = status(self.tid)
        if before.state in "Tt":
            reason = "traced" if before.tracer else "stopped"
            return AttachError(f"process {self.tid} is stopped", reason=reason, hint=_how_to_continue(self.tid))
        try:
            request(SEIZE, self.tid, 0, _TRACE_SYSGOOD | _TRACE_EXEC)
        except OSError as exc:
            if exc.errno != errno.EPERM:
                raise
            return exc
        self._seized = True
        return None

    def release(self) -> None:
        """Restore the thread's state and resume it.

        Does nothing if the thread is not seized. If the thread is left running in a call, the kernel releases it when this
        process ends.
        """
        if not self._seized:
            return
        self._until, self._events = time.monotonic() + GRACE_S, 0
        is_left = self._is_late and self.is_left_in_calls
        if self._runs and not is_left:
            self._break_off()
        if not is_left:
            self._restore()
        self._let_go()

    def _break_off(self) -> None:
        """Stop the thread in the middle of a call.

        A fault is not passed on: it may be the call's return.
        """
        request(INTERRUPT, self.tid)
        state = self._wait()
        if state >> 16 != _EVENT_STOP and os.WSTOPSIG(state) not in _FAULTS:
            self._deferred.append(os.WSTOPSIG(state))

    def _let_go(self) -> None:
        """Detach, and send the deferred signals."""
        self._seized = False
        send = self._sender() if self._deferred else None
        if not self._runs:
            request(DETACH, self.tid)
        self.released_ns = time.monotonic_ns()
        if send is not None:
            for number in self._deferred:
                with contextlib.suppress(OSError):  # the process has ended
                    send(number)

    def _sender(self) -> Callable[[int], object]:
        """Return a function that sends the process a signal even after the detach, when its pid may be reused."""
        try:
            pidfd = os.pidfd_open(self.tid)
        except OSError:  # before Linux 5.3
            tgkill = {"x86_64": 234, "aarch64": 131}[platform.machine()]
            return lambda number: libc().syscall(tgkill, self.tid, self.tid, number)
        return lambda number: signal.pidfd_send_signal(pidfd, number)

    @abc.abstractmethod
    def ask(self, function: int) -> int:
        """Call a C function that makes no system call and returns 0 or 1; return its result."""

    @abc.abstractmethod
    def call(self, function: int, *arguments: int) -> None:
        """Call a C function; its result is lost."""

    @abc.abstractmethod
    def map_memory(self, mmap: int, size: int) -> int:
        """Call libc's `mmap` for private readable and writable memory; return its address."""

    @abc.abstractmethod
    def _save(self) -> None: ...

    @abc.abstractmethod
    def _restore(self) -> None: ...

    def _wait_for_interrupt(self) -> None:
        while True:
            state = self._wait()
            if state >> 16 == _EVENT_STOP:
                if os.WSTOPSIG(state) == signal.SIGTRAP:
                    return
                self._seized = False
                request(DETACH, self.tid)  # a group stop: a signal has just stopped the whole process
                hint = _how_to_continue(self.tid)
                raise AttachError(f"process {self.tid} was stopped by a signal", reason="stopped", hint=hint)
            self._resume(CONT, os.WSTOPSIG(state))  # a pending signal: pass it on

    def _proceed(self, how: int) -> int:
        """Run the thread to the next fault or system call stop, holding signals; return the wait status."""
        while True:
            self._resume(how)
            state = self._wait()
            if state >> 16 == _EVENT_STOP:
                continue
            if os.WSTOPSIG(state) in _FAULTS or os.WSTOPSIG(state) == _SYSCALL_STOP:
                return state
            self._deferred.append(os.WSTOPSIG(state))

    def _resume(self, how: int, number: int = 0) -> None:
        self._events += 1
        if self._events > self.most_events:
            self._is_late = True
            raise AttachError(
                f"process {self.tid} does not return from a call: it has made {self._events // 2} system calls",
                reason="fault",
                hint=how_to_report(self.tid),
            )
        request(how, self.tid, 0, number)
        self._runs = True

    def _wait(self) -> int:
        for _ in self._moments():
            try:
                pid, state = os.waitpid(self.tid, os.WNOHANG | _WALL)
            except ChildProcessError:  # an exec in another thread of the process has ended this thread
                self._seized = False
                raise lost(self.tid) from None
            if pid:
                self._runs = False
                if not os.WIFSTOPPED(state):
                    self._seized = False
                    raise AttachError(f"process {self.tid} ended while hookd was attaching", reason="died")
                if state >> 16 == _EVENT_EXEC:
                    self._let_go()
                    raise lost(self.tid)
                return state
        self._is_late = True
        hint = "It may wait in the kernel for a disk or a driver, or the machine is very busy: try again later."
        raise AttachError(f"the main thread of process {self.tid} does not stop", reason="blocked", hint=hint)

    def _moments(self) -> Iterator[None]:
        """Spin a little, then sleep until a child changes state; the sleeps are short because a stop is short."""
        for _ in range(_SPINS):
            yield
        while (left := self._until - time.monotonic()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], min(left, 0.002))
            yield

    def _get_set(self, note: int, buffer: ctypes.Array[ctypes.c_char] | ctypes.Structure) -> int:
        """Read a register set; return its size in bytes."""
        vector = _Iovec(ctypes.addressof(buffer), ctypes.sizeof(buffer))
        request(GETREGSET, self.tid, note, ctypes.addressof(vector))
        return int(vector.length)

    def _put_set(self, note: int, buffer: ctypes.Array[ctypes.c_char] | ctypes.Structure, size: int) -> None:
        vector = _Iovec(ctypes.addressof(buffer), size)
        request(SETREGSET, self.tid, note, ctypes.addressof(vector))

    def _get_state(self, notes: tuple[int, ...]) -> tuple[int, ctypes.Array[ctypes.c_char], int]:
        """Read the first of the register sets `notes` that this machine has."""
        buffer = ctypes.create_string_buffer(1 << 16)
        for note in notes:
            with contextlib.suppress(OSError):
                return note, buffer, self._get_set(note, buffer)
        raise TargetUnsupported("this kernel does not provide the floating point state", reason="architecture")


def _how_to_continue(tid: int) -> str:
    return f"Continue it with `kill -CONT {tid}`, or end the debugger that holds it, then try again."


def how_to_report(tid: int) -> str:
    """Return the hint for a call in a target that did not end as it should."""
    return f"The process goes on as before. Report it, with the output of `hookd doctor {tid} --json`."


def thread(memory: Memory, returns: tuple[int, int]) -> Thread:
    """Return a `Thread` for this machine's architecture.

    Args:
        memory: of its process.
        returns: see `interpreter.Libc`.

    Raises:
        TargetUnsupported: reason "architecture".
    """
    machine = platform.machine()
    if machine == "x86_64":
        from hookd.tool.inject.x86_64 import X86Thread  # noqa: PLC0415  one machine, one module

        return X86Thread(memory, returns)
    if machine == "aarch64":
        from hookd.tool.inject.aarch64 import ArmThread  # noqa: PLC0415

        return ArmThread(memory)
    raise TargetUnsupported(f"hookd cannot attach on {machine}", reason="architecture")
