"""Make calls in a stopped thread on x86_64, such that the target survives the tracer's death at any moment.

This runs in the injector. The method needs no code of ours. The called function does not return to an invalid address, but to the
code that ends every signal handler (`mov $15, %rax; syscall` in libc), with a signal frame on the stack that holds the thread's
complete state. If the tracer dies, the thread returns from the call into `rt_sigreturn`, and the kernel itself restores the
state. If the tracer lives, it stops the thread at the entry of that system call and restores the state itself, which is more
exact: an interrupted sleep then continues instead of returning EINTR.

In this case `rt_sigreturn` must not run. A system call cannot be skipped reliably (seccomp filters see number -1), so it is
changed into `getpid` with the instruction pointer back at `mov $15, %rax`: this is still safe if the tracer dies now.

`rt_sigreturn` needs rax, so the result of a call is lost. If the result (0 or 1) is needed, the call first returns to a
`syscall; ret`, at whose entry the tracer sees rax. If the tracer dies there, the thread makes a read or write on descriptor -1.
Nothing is single-stepped: if its tracer dies meanwhile, the thread keeps the trap flag and is killed by it (measured).

Source: arch/x86/kernel/signal_64.c (rt_sigframe), arch/x86/kernel/fpu/signal.c (check_xstate_in_sigframe),
arch/x86/kernel/signal.c (restart of system calls), Linux 6.18.
"""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import struct
from typing import TYPE_CHECKING

from hookd.errors import AttachError
from hookd.tool.inject import mailbox, ptrace

if TYPE_CHECKING:
    from hookd.tool.linux.memory import Memory

_NT_XSTATE = 0x202
_MMAP, _RT_SIGRETURN, _GETPID, _RESTART = 9, 15, 39, 219
_NONE = 0xFFFFFFFFFFFFFFFF
_RED_ZONE = 128
_SYSCALL_LENGTH = 2
_TRAP_AND_DIRECTION = 0x100 | 0x400
_RESTART_SAME, _RESTART_BLOCK = (-512, -513, -514), -516
_NAMES = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs"
_FRAME_ORDER = "r8 r9 r10 r11 r12 r13 r14 r15 rdi rsi rbp rbx rdx rax rcx rsp rip eflags"
_frame_registers = operator.attrgetter(*_FRAME_ORDER.split())
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
# Extended state: the magic words of a signal frame, and Intel's AMX, which is not permitted in the frames of most processes.
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_AMX = 0x60000
_SIZE_WITHOUT_AMX = 2696


class _Registers(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _NAMES.split())


class X86Thread(ptrace.Thread):
    """One thread on x86_64.

    Args:
        memory: of its process.
        returns: addresses of `mov $15, %rax; syscall` and `syscall; ret` in the target.
    """

    is_left_in_calls = True

    def __init__(self, memory: Memory, returns: tuple[int, int]) -> None:
        super().__init__(memory)
        self._sigreturn, self._syscall_ret = returns
        if not (self._sigreturn and self._syscall_ret):
            hint = "Start the training with `hookd run -- ...`, which does not need this."
            raise AttachError(f"the C library of process {self.tid} is of an unknown kind", reason="libc", hint=hint)
        self._frame = 0
        self._at_entry = False
        self._saved = _Registers()

    def ask(self, function: int) -> int:
        """See `Thread`."""
        self._enter(function, _NONE, is_asked=True)
        now = self._to_system_call()
        while not (self._at_entry and now.rip == self._syscall_ret + _SYSCALL_LENGTH and now.rsp == self._frame):
            now = self._to_system_call()
        return int(now.orig_rax)

    def call(self, function: int, *arguments: int) -> None:
        """See `Thread`."""
        self._enter(function, *arguments)
        while True:
            now = self._to_system_call()
            if self._at_entry and now.orig_rax == _RT_SIGRETURN and now.rsp == self._frame + 8:
                return

    def map_memory(self, mmap: int, size: int) -> int:
        """See `Thread`."""
        read_write, private_anonymous = 3, 0x22
        arguments = (0, size, read_write, private_anonymous)
        self._enter(mmap, *arguments, _NONE, 0)
        now = self._to_system_call()
        while self._at_entry or now.orig_rax != _MMAP:
            if self._at_entry and now.orig_rax == _MMAP and (now.rdi, now.rsi, now.rdx, now.r10) != arguments:
                raise AttachError(f"process {self.tid} maps other memory than it was asked for", reason="memory")
            now = self._to_system_call()
        address = ctypes.c_int64(now.rax).value
        if -4096 < address < 0:
            raise AttachError(
                f"process {self.tid} gets no memory (mmap: {address})", reason="no-memory", hint=mailbox.MORE_MEMORY
            )
        return address

    def _save(self) -> None:
        self._get_set(ptrace.NT_PRSTATUS, self._saved)
        self._note, self._xstate, self._xsize = self._get_state((_NT_XSTATE,))
        self._resumed = _restarted(self._saved)

    def _restore(self) -> None:
        if not self._frame:
            return  # nothing was changed
        if self._at_entry:
            self._leave_sigreturn()
        self._put_set(self._note, self._xstate, self._xsize)
        self._put_set(ptrace.NT_PRSTATUS, self._resumed, ctypes.sizeof(self._resumed))

    def _leave_sigreturn(self) -> None:
        now = self._registers()
        now.orig_rax, now.rip = _GETPID, self._sigreturn
        self._put_set(ptrace.NT_PRSTATUS, now, ctypes.sizeof(now))
        self._to_system_call()

    def _enter(self, function: int, *arguments: int, is_asked: bool = False) -> None:
        """Set the registers for a call that returns into `rt_sigreturn`, through `syscall; ret` if `is_asked`."""
        if not self._frame:
            self._write_frame()
        now = _copy(self._saved)
        for name, value in zip(_ARGUMENTS, arguments):  # noqa: B905  fewer arguments than registers
            setattr(now, name, value)
        now.rip, now.rsp, now.rax = function, self._frame - 16 * is_asked, 0
        now.orig_rax = _GETPID if self._at_entry else _NONE
        now.eflags &= ~_TRAP_AND_DIRECTION
        self._put_set(ptrace.NT_PRSTATUS, now, ctypes.sizeof(now))

    def _to_system_call(self) -> _Registers:
        """Run the thread to the next entry or exit of a system call."""
        state = self._proceed(ptrace.SYSCALL)
        now = self._registers()
        if os.WSTOPSIG(state) != signal.SIGTRAP | 0x80:
            raise self._fault(state, now)
        self._at_entry = not self._at_entry
        return now

    def _registers(self) -> _Registers:
        now = _Registers()
        self._get_set(ptrace.NT_PRSTATUS, now)
        return now

    def _fault(self, state: int, now: _Registers) -> AttachError:
        name = signal.Signals(os.WSTOPSIG(state)).name
        return AttachError(
            f"a call in process {self.tid} failed with {name} at {now.rip:#x}",
            reason="fault",
            hint=ptrace.how_to_report(self.tid),
        )

    def _write_frame(self) -> None:
        """Write the signal frame below the red zone: return address, ucontext, siginfo, extended state."""
        mask = ctypes.c_uint64()
        ptrace.request(ptrace.GETSIGMASK, self.tid, 8, ctypes.addressof(mask))
        xstate, has_xstate = _frame_xstate(self._xstate.raw[: self._xsize])
        xstate_at = (self._saved.rsp - _RED_ZONE - len(xstate)) & ~63
        frame = ((xstate_at - 440) & ~15) - 8
        # An invalid mode of the alternative stack makes the kernel leave that stack unchanged.
        head = struct.pack("<QQQQQQ", self._sigreturn, 6 | has_xstate, 0, 0, 0x7FFFFFFF, 0)
        context = struct.pack("<18Q", *_frame_registers(self._resumed))
        context += struct.pack("<HHHH", self._saved.cs, 0, 0, self._saved.ss)
        context += struct.pack("<QQQQQ64x", 0, 0, 0, 0, xstate_at)
        data = head + context + struct.pack("<Q", mask.value) + bytes(128)
        # Below the frame, for `ask`: a plain return, which keeps the stack aligned at entry, and `syscall; ret`.
        detour = struct.pack("<QQ", self._syscall_ret + _SYSCALL_LENGTH, self._syscall_ret)
        self._memory.write(frame - len(detour), detour + data.ljust(xstate_at - frame, b"\0") + xstate)
        self._frame = frame


def _copy(registers: _Registers) -> _Registers:
    return _Registers.from_buffer_copy(registers)


def _restarted(saved: _Registers) -> _Registers:
    """Return the registers that the kernel would set to resume a thread from inside a system call."""
    resumed = _copy(saved)
    if ctypes.c_int64(saved.orig_rax).value >= 0:
        result = ctypes.c_int64(saved.rax).value
        if result in _RESTART_SAME or result == _RESTART_BLOCK:
            resumed.rax = _RESTART if result == _RESTART_BLOCK else saved.orig_rax
            resumed.rip -= _SYSCALL_LENGTH
    resumed.orig_rax = _NONE
    return resumed


def _frame_xstate(xstate: bytes) -> tuple[bytes, int]:
    """Return the extended state as in a signal frame, and 1 if it exceeds the classic 512 bytes."""
    size = len(xstate)
    if size < 576:
        return xstate.ljust(512, b"\0")[:512], 0
    (features,) = struct.unpack_from("<Q", xstate, 464)
    (in_use,) = struct.unpack_from("<Q", xstate, 512)
    if features & _AMX and not in_use & _AMX:
        features, size = features & ~_AMX, min(size, _SIZE_WITHOUT_AMX)
    software = struct.pack("<IIQI28x", _MAGIC1, size + 4, features, size)
    return xstate[:464] + software + xstate[512:size] + struct.pack("<I", _MAGIC2), 1
