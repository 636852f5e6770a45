"""Stop one thread of another process, let it make a few calls, and let it go on as if nothing had been. Injector.

What is promised for a stop:
- no byte of code is written, no executable memory is made, nothing is allocated on the target's heap;
- every register and the whole floating point state are put back;
- signals that arrive meanwhile are held and sent again (what `sigqueue` attached to them is lost);
- on x86_64 the target survives the death of the tracer at any moment: see `x86_64.py`.

Source: ptrace(2); kernel/ptrace.c and kernel/signal.c of Linux 6.18.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
import platform
import signal
import time
from typing import TYPE_CHECKING

from hookd.attach.proc import libc, status
from hookd.errors import AttachError, TargetUnsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

CONT, DETACH, SYSCALL = 7, 17, 24
SETOPTIONS, GETREGSET, SETREGSET, SEIZE, INTERRUPT, GETSIGMASK = 0x4200, 0x4204, 0x4205, 0x4206, 0x4207, 0x420A
NT_PRSTATUS = 1
_TRACE_SYSGOOD = 1
_EVENT_STOP = 128
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_FAULTS = frozenset(
    {signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGABRT}
)
_SPINS = 100


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
    """One thread under ptrace. The order of use is `stop`, calls, `release`.

    Attributes:
        stopped_ns: when it was seen to stand still, in ns of the monotonic clock.
        released_ns: when it was let go.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.stopped_ns = self.released_ns = 0
        self._seized = False
        self._held: list[int] = []
        self._timeout_s = 2.0

    def stop(self, timeout_s: float) -> None:
        """Seize the thread, bring it to a stand and save its state.

        Raises:
            AttachError: reasons "traced", "stopped", "died", "blocked" (it does not stop).
            OSError: EPERM and ENOSYS, for the caller to explain.
        """
        before = status(self.tid)
        if before.state in "Tt":
            raise AttachError(f"process {self.tid} is stopped", reason="traced" if before.tracer else "stopped")
        self._timeout_s = timeout_s
        request(SEIZE, self.tid, 0, _TRACE_SYSGOOD)
        self._seized = True
        request(INTERRUPT, self.tid)
        self._wait_for_interrupt()
        self.stopped_ns = time.monotonic_ns()
        self._save()

    def release(self) -> None:
        """Put everything back and let the thread go. Nothing happens if it is not held."""
        if not self._seized:
            return
        self._restore()
        request(DETACH, self.tid)
        self.released_ns = time.monotonic_ns()
        self._seized = False
        for number in self._held:
            self._send(number)

    def interrupt(self) -> None:
        """Bring the thread to a stand again, out of a call that did not return in time."""
        request(INTERRUPT, self.tid)
        self._wait_for_interrupt()

    @abc.abstractmethod
    def ask(self, function: int) -> int:
        """Call a C function that makes no system call and returns 0 or 1; give that."""

    @abc.abstractmethod
    def call(self, function: int, *arguments: int, timeout_s: float = 2.0) -> None:
        """Call a C function; what it returns is lost."""

    @abc.abstractmethod
    def map_memory(self, mmap: int, size: int) -> int:
        """Call libc's `mmap` for private readable and writable memory; give its address."""

    @abc.abstractmethod
    def _save(self) -> None: ...

    @abc.abstractmethod
    def _restore(self) -> None: ...

    def _wait_for_interrupt(self) -> None:
        while True:
            state = self._wait(self._timeout_s)
            if state >> 16 == _EVENT_STOP:
                if os.WSTOPSIG(state) == signal.SIGTRAP:
                    return
                self._seized = False
                request(DETACH, self.tid)  # a group stop: somebody has just stopped the whole process
                raise AttachError(f"process {self.tid} was stopped by a signal", reason="stopped")
            request(CONT, self.tid, 0, os.WSTOPSIG(state))  # a signal on its way: pass it on

    def _proceed(self, how: int) -> int:
        """Let the thread run until something of ours happens; give the wait status. Signals are held."""
        while True:
            request(how, self.tid)
            state = self._wait(self._timeout_s)
            if state >> 16 == _EVENT_STOP:
                continue
            if os.WSTOPSIG(state) in _FAULTS or os.WSTOPSIG(state) == _SYSCALL_STOP:
                return state
            self._held.append(os.WSTOPSIG(state))

    def _wait(self, timeout_s: float) -> int:
        for _ in self._moments(timeout_s):
            pid, state = os.waitpid(self.tid, os.WNOHANG | _WALL)
            if pid:
                if os.WIFSTOPPED(state):
                    return state
                self._seized = False
                raise AttachError(f"process {self.tid} ended while hookd was attaching", reason="died")
        raise AttachError(f"the main thread of process {self.tid} does not stop", reason="blocked")

    @staticmethod
    def _moments(timeout_s: float) -> Iterator[None]:
        """Spin a little, then sleep until a child changes state; a stop is too short to sleep for long."""
        for _ in range(_SPINS):
            yield
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            signal.sigtimedwait([signal.SIGCHLD], min(left, 0.002))
            yield

    def _send(self, number: int) -> None:
        tgkill = {"x86_64": 234, "aarch64": 131}[platform.machine()]
        libc().syscall(tgkill, status(self.tid).pid, self.tid, number)

    def _get_set(self, note: int, buffer: ctypes.Array[ctypes.c_char] | ctypes.Structure) -> int:
        """Read a register set; give its size in bytes."""
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
        raise TargetUnsupported("this kernel does not give the floating point state", reason="architecture")


def thread(tid: int, returns: tuple[int, int]) -> Thread:
    """Make the `Thread` of this machine.

    Args:
        tid: its number, which for a main thread is the pid.
        returns: see `interpreter.Libc`.

    Raises:
        TargetUnsupported: reason "architecture".
    """
    machine = platform.machine()
    if machine == "x86_64":
        from hookd.attach.x86_64 import X86Thread  # noqa: PLC0415  one machine, one module

        return X86Thread(tid, returns)
    if machine == "aarch64":
        from hookd.attach.aarch64 import ArmThread  # noqa: PLC0415

        return ArmThread(tid)
    raise TargetUnsupported(f"hookd cannot attach on {machine}", reason="architecture")
