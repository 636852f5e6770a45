"""Check whether a process's seccomp filters would kill it for an agent's system calls.

Runs in the injector. Reading the filters takes CAP_SYS_ADMIN, no filter on the injector itself, and a kernel with
CONFIG_CHECKPOINT_RESTORE. If they cannot be read, the check finds nothing.

Source: ptrace(2), PTRACE_SECCOMP_GET_FILTER; seccomp(2); net/core/filter.c of Linux 6.18 (the classic instructions).
"""

from __future__ import annotations

import ctypes
import errno
import operator
import struct
from typing import TYPE_CHECKING

from hookd.tool.linux.proc import libc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Instruction = tuple[int, int, int, int]

_GET_FILTER = 0x420C
_MOST = 64
_ACTION, _KILL_THREAD, _TRAP, _KILL_PROCESS = 0xFFFF0000, 0x00000000, 0x00030000, 0x80000000
_WORD = 0xFFFFFFFF
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls of an agent that a training process may never have made, by number and first arguments: a stream socket of AF_UNIX.
_STREAM = 1 | 0x80800
CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "memfd_create": (319,), "socket": (41, 1, _STREAM), "socketpair": (53, 1, _STREAM), "bind": (49,),
        "listen": (50,), "accept4": (288,), "getsockopt": (55,), "epoll_create1": (291,), "epoll_ctl": (233,),
        "epoll_wait": (232,), "ftruncate": (77,), "fchmod": (91,), "getdents64": (217,), "mmap": (9,), "getpid": (39,),
    },
    "aarch64": {
        "memfd_create": (279,), "socket": (198, 1, _STREAM), "socketpair": (199, 1, _STREAM), "bind": (200,),
        "listen": (201,), "accept4": (242,), "getsockopt": (209,), "epoll_create1": (20,), "epoll_ctl": (21,),
        "epoll_pwait": (22,), "ftruncate": (46,), "fchmod": (52,), "getdents64": (61,), "mmap": (222,), "getpid": (172,),
    },
}  # fmt: skip


def filters(tid: int) -> list[list[Instruction]]:
    """Return the filters of a thread that we have stopped; none if they cannot be read."""
    programs: list[list[Instruction]] = []
    while len(programs) < _MOST:
        count = libc().ptrace(_GET_FILTER, tid, len(programs), None)
        if count < 0:
            return programs if ctypes.get_errno() == errno.ENOENT else []
        buffer = ctypes.create_string_buffer(8 * count)
        libc().ptrace(_GET_FILTER, tid, len(programs), ctypes.addressof(buffer))
        programs.append(list(struct.iter_unpack("<HBBI", buffer.raw)))
    return programs


def deadly(programs: Sequence[Sequence[Instruction]], machine: str) -> list[str]:
    """Return the names of an agent's system calls for which one of the filters would kill the process."""
    architecture = _ARCHITECTURES[machine]
    return [
        name
        for name, (number, *arguments) in CALLS[machine].items()
        if any(_kills(run(program, number, architecture, arguments)) for program in programs)
    ]


def _kills(action: int) -> bool:
    return action & _ACTION in (_KILL_PROCESS, _KILL_THREAD, _TRAP)


def run(program: Sequence[Instruction], number: int, architecture: int, arguments: Iterable[int] = ()) -> int:
    """Return the action of a filter for a system call; "allow" for a program that runs past its end."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    machine = _Machine(data)
    at = 0
    while 0 <= at < len(program):
        code, yes, no, value = program[at]
        kind = code & 7
        if kind == _RET:
            return machine.a if code & 0x18 == _FROM_A else value
        at += 1 + (machine.jump(code, yes, no, value) if kind == _JMP else machine.step(code, value))
    return _ALLOW


_LD, _LDX, _ST, _STX, _ALU, _JMP, _RET, _MISC = range(8)
_FROM_X, _FROM_A, _ALLOW = 0x08, 0x10, 0x7FFF0000
_ALU_OPERATIONS: dict[int, Callable[[int, int], int]] = {
    0x00: operator.add, 0x10: operator.sub, 0x20: operator.mul, 0x40: operator.or_, 0x50: operator.and_,
    # The kernel refuses a constant shift of 32 or more; of X it uses the lower five bits, as the processor does.
    0x60: lambda a, b: a << (b & 31), 0x70: lambda a, b: a >> (b & 31), 0xA0: operator.xor, 0x30: lambda a, b: a // b if b else 0,
    0x80: lambda a, _: -a,
}  # fmt: skip
_TESTS = {0x10: operator.eq, 0x20: operator.gt, 0x30: operator.ge, 0x40: operator.and_}


class _Machine:
    """The state of classic BPF: accumulator, index and sixteen words of memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.a = self._x = 0
        self._memory = [0] * 16

    def jump(self, code: int, yes: int, no: int, value: int) -> int:
        """Return how many instructions to skip."""
        if code & 0xF0 == 0:
            return value
        return yes if _TESTS[code & 0xF0](self.a, self._x if code & _FROM_X else value) else no

    def step(self, code: int, value: int) -> int:
        """Execute an instruction other than a jump or a return; return 0, the number of instructions to skip."""
        kind = code & 7
        if kind == _LD:
            self.a = self._load(code, value)
        elif kind == _LDX:
            self._x = self._load(code, value)
        elif kind in (_ST, _STX):
            self._memory[value & 15] = self.a if kind == _ST else self._x
        elif kind == _ALU:
            self.a = _ALU_OPERATIONS[code & 0xF0](self.a, self._x if code & _FROM_X else value) & _WORD
        elif code & 0xF8:
            self.a = self._x
        else:
            self._x = self.a
        return 0

    def _load(self, code: int, value: int) -> int:
        mode = code & 0xE0
        if mode == 0x20:
            return int.from_bytes(self._data[value : value + 4], "little")
        return {0x00: value, 0x60: self._memory[value & 15]}.get(mode, len(self._data))
