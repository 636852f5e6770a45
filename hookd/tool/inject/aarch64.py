"""Make calls in a stopped thread on aarch64. Runs in the injector.

The called function returns to an unmapped address; only the tracer sees the fault. If the tracer is killed between the call and
`release` (about 0.1 ms), the target dies of that fault. The method of `x86_64.py` would avoid this, but here register x7 cannot
be set at a system call stop (arch/arm64/kernel/ptrace.c, report_syscall). Instead the injector is made hard to kill.

System calls in progress need no treatment: the kernel has rewound pc and x0 before the stop (do_signal), so they are made again
after it. One with a relative timeout that the kernel would continue with what is left of it (`nanosleep`) then begins anew. Python's
own sleeps are absolute, or keep what is left in the program's memory.

The thread may stop inside a function of SME, in streaming mode, where most vector instructions are illegal: nothing can be called
there, and its registers are not those of NT_ARM_SVE. It is then left as it is, and the attach fails.

Source: arch/arm64/kernel/signal.c and ptrace.c, Documentation/arch/arm64/sve.rst and sme.rst of Linux 6.18; the procedure call
standard (AAPCS64), 6.2 and 6.4. `tests/unit/test_attach_aarch64.py` makes the calls without ptrace, which emulators lack.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

from hookd.errors import AttachError
from hookd.tool.inject import mailbox, ptrace

if TYPE_CHECKING:
    from hookd.tool.linux.memory import Memory

_NT_FLOATING, _NT_SVE = 2, 0x405
_SVE_HEADER = 16  # bytes; all that NT_ARM_SVE has in streaming mode
# The kind of branch that the last instruction was: a function that is not made to be reached by it would be refused (BTI).
_BRANCH_TYPE = 3 << 10
# Below mmap_min_addr, so never mapped; aligned to 4, because a misaligned pc raises a different fault.
_RETURN = 0xDEA0
_NONE = 0xFFFFFFFFFFFFFFFF


class _Registers(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64 * 31),
        ("sp", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("pstate", ctypes.c_uint64),
    )


class ArmThread(ptrace.Thread):
    """One thread on aarch64.

    Args:
        memory: of its process.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._saved = _Registers()
        self._changed = False

    def ask(self, function: int) -> int:
        """See `Thread`."""
        return ctypes.c_int(self._run(function) & 0xFFFFFFFF).value

    def call(self, function: int, *arguments: int) -> None:
        """See `Thread`."""
        self._run(function, *arguments)

    def map_memory(self, mmap: int, size: int) -> int:
        """See `Thread`."""
        read_write, private_anonymous = 3, 0x22
        address = self._run(mmap, 0, size, read_write, private_anonymous, _NONE, 0)
        if address == _NONE:
            raise AttachError(f"process {self.tid} gets no memory", reason="no-memory", hint=mailbox.MORE_MEMORY)
        return address

    def _save(self) -> None:
        self._get_set(ptrace.NT_PRSTATUS, self._saved)
        self._note, self._floating, self._floating_size = self._get_state((_NT_SVE, _NT_FLOATING))
        if self._note == _NT_SVE and self._floating_size <= _SVE_HEADER:
            hint = "Try again in a moment."
            raise AttachError(f"process {self.tid} is in a function of SME", reason="blocked", hint=hint)

    def _restore(self) -> None:
        if self._changed:
            self._put_set(self._note, self._floating, self._floating_size)
            self._put_set(ptrace.NT_PRSTATUS, self._saved, ctypes.sizeof(self._saved))

    def _run(self, function: int, *arguments: int) -> int:
        now = _Registers.from_buffer_copy(self._saved)
        for i, value in enumerate(arguments):
            now.x[i] = value
        now.x[30] = _RETURN
        now.sp = (now.sp - 256) & ~15
        now.pc = function
        now.pstate &= ~_BRANCH_TYPE
        self._changed = True
        self._put_set(ptrace.NT_PRSTATUS, now, ctypes.sizeof(now))
        state = self._proceed(ptrace.CONT)
        self._get_set(ptrace.NT_PRSTATUS, now)
        if os.WSTOPSIG(state) not in (signal.SIGSEGV, signal.SIGBUS) or now.pc != _RETURN:
            name = signal.Signals(os.WSTOPSIG(state)).name
            raise AttachError(
                f"a call in process {self.tid} failed with {name} at {now.pc:#x}",
                reason="fault",
                hint=ptrace.how_to_report(self.tid),
            )
        return int(now.x[0])
