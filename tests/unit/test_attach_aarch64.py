"""Calls in a stopped thread of a 64-bit ARM machine: what is asked of the kernel, on any machine, and the calls themselves, on such a one.

Emulators of single programs have no ptrace. So a kernel is played here: it knows the registers in the layout of Linux
(arch/arm64/include/uapi/asm/ptrace.h), and on such a machine, emulated or not, it runs the calls in the test's own process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
from types import SimpleNamespace

import pytest

from hookd.errors import AttachError
from hookd.tool.attach import discover
from hookd.tool.inject import aarch64, elf, interpreter, mailbox, ptrace, seccomp
from hookd.tool.linux import proc
from hookd.wire import originals
from hookd.wire.page import layout, memory
from tests.support.environment import REPOSITORY
from tests.support.stub import own_memory

SUPPORT = REPOSITORY / "tests" / "support"
REGISTERS = struct.Struct("<34Q")  # x0 to x30, sp, pc, pstate
SP, PC, PSTATE = 31, 32, 33
FUNCTION, RETURNS_TO = 0xFFFF_8000_1234, 0xDEA0
ON_ARM = pytest.mark.skipif(platform.machine() != "aarch64", reason="runs code of 64-bit ARM")
CONSTANTS = {
    "registers": 272, "sp": 248, "pc": 256, "pstate": 264, "x30": 240, "branch type": 0xC00, "sve header": 16, "iovec": 16,
    "iov_len": 8, "NT_PRSTATUS": 1, "NT_PRFPREG": 2, "NT_ARM_SVE": 0x405, "EM_AARCH64": 183, "symbol": 24,
    "program header": 56, "AUDIT_ARCH_AARCH64": 0xC00000B7, "PTRACE_CONT": 7, "PTRACE_DETACH": 17, "PTRACE_SYSCALL": 24,
    "PTRACE_GETREGSET": 0x4204, "PTRACE_SETREGSET": 0x4205, "PTRACE_SEIZE": 0x4206, "PTRACE_INTERRUPT": 0x4207,
    "PTRACE_GETSIGMASK": 0x420A, "PTRACE_SECCOMP_GET_FILTER": 0x420C, "PTRACE_O_TRACESYSGOOD": 1, "PTRACE_O_TRACEEXEC": 16,
    "PTRACE_EVENT_EXEC": 4, "PTRACE_EVENT_STOP": 128, "read and write": 3, "private anonymous": 0x22, "MAP_FIXED": 0x10,
    "MAP_NORESERVE": 0x4000, "F_ADD_SEALS": 1033, "F_GET_SEALS": 1034, "MFD_CLOEXEC": 1, "MFD_ALLOW_SEALING": 2,
    "RLIMIT_FSIZE": 1, "RLIMIT_NOFILE": 7, "RLIMIT_AS": 9, "POLLRDHUP": 0x2000, "memfd_create": 279, "socket": 198,
    "socketpair": 199, "bind": 200, "listen": 201, "accept4": 242, "getsockopt": 209, "epoll_create1": 20, "epoll_ctl": 21,
    "epoll_pwait": 22, "ftruncate": 46, "fchmod": 52, "getdents64": 61, "mmap": 222, "getpid": 172, "tgkill": 131,
    "wait4": 260, "waitid": 95, "ppoll": 73, "pselect6": 72,
}  # fmt: skip
"""As `aarch64_constants.c` prints them, with the headers of Linux 6.1 and 6.12."""


def test_the_constants_are_those_of_the_kernel():
    fields = {name: getattr(aarch64._Registers, name).offset for name in ("sp", "pc", "pstate")}
    assert fields == {name: CONSTANTS[name] for name in fields}
    names = (
        "PTRACE_CONT PTRACE_DETACH PTRACE_SYSCALL PTRACE_GETREGSET PTRACE_SETREGSET PTRACE_SEIZE PTRACE_INTERRUPT "
        "PTRACE_GETSIGMASK"
    ).split()
    assert [getattr(ptrace, name.removeprefix("PTRACE_")) for name in names] == [CONSTANTS[name] for name in names]
    ours = {
        "registers": ctypes.sizeof(aarch64._Registers), "branch type": aarch64._BRANCH_TYPE, "sve header": aarch64._SVE_HEADER,
        "iovec": ctypes.sizeof(ptrace._Iovec), "iov_len": ptrace._Iovec.length.offset, "NT_PRSTATUS": ptrace.NT_PRSTATUS,
        "NT_PRFPREG": aarch64._NT_FLOATING, "NT_ARM_SVE": aarch64._NT_SVE, "EM_AARCH64": elf.MACHINES["aarch64"],
        "AUDIT_ARCH_AARCH64": seccomp._ARCHITECTURES["aarch64"], "PTRACE_SECCOMP_GET_FILTER": seccomp._GET_FILTER,
        "PTRACE_O_TRACESYSGOOD": ptrace._TRACE_SYSGOOD, "PTRACE_O_TRACEEXEC": ptrace._TRACE_EXEC,
        "PTRACE_EVENT_EXEC": ptrace._EVENT_EXEC, "PTRACE_EVENT_STOP": ptrace._EVENT_STOP, "MAP_FIXED": memory._MAP_FIXED,
        "MAP_NORESERVE": memory._MAP_NORESERVE, "F_ADD_SEALS": layout.F_ADD_SEALS, "F_GET_SEALS": layout.F_GET_SEALS,
        "MFD_CLOEXEC": memory._CLOEXEC, "MFD_ALLOW_SEALING": memory._ALLOW_SEALING, "RLIMIT_FSIZE": originals.MOST_FILE_BYTES,
        "RLIMIT_NOFILE": originals.MOST_FILES, "RLIMIT_AS": originals.MOST_ADDRESSES, "POLLRDHUP": originals.HAS_LEFT,
        **{name: call[0] for name, call in seccomp.CALLS["aarch64"].items()},
    }  # fmt: skip
    assert ours == {name: CONSTANTS[name] for name in ours}
    assert memory._MEMFD_CREATE["aarch64"] == CONSTANTS["memfd_create"]
    waits = ("wait4", "waitid", "epoll_pwait", "ppoll", "pselect6")
    assert set(discover._WAITS["aarch64"]) == {CONSTANTS[name] for name in waits}


def compiled(source, made, *options):
    done = subprocess.run(["cc", *options, "-o", made, SUPPORT / source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


@ON_ARM
def test_the_headers_of_this_machine_say_the_same(tmp_path):
    program = compiled("aarch64_constants.c", tmp_path / "constants")
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {name: int(value) for name, value in (line.rsplit(" ", 1) for line in lines)} == CONSTANTS


class Kernel:
    """A stopped thread behind ptrace.

    Args:
        floating: what NT_ARM_SVE has; None: the processor has no SVE, and there is NT_PRFPREG.
        run: runs the thread with its registers to the end of the call, and returns the signal.
        registers: those of the thread.
    """

    def __init__(self, monkeypatch, floating=None, run=None, registers=None):
        self.before = registers or [*(0x1111 * n for n in range(31)), 0x7FFF_F008, 0x40_0000, 0x8000_0C00]
        self.registers = list(self.before)
        self.note = 2 if floating is None else 0x405
        self.floating = bytes(range(256)) * 2 + bytes(16) if floating is None else floating
        self.run = run or self._return
        self.entered, self.requests, self.states = [], [], [128 << 16 | signal.SIGTRAP << 8 | 0x7F]
        monkeypatch.setattr(ptrace, "request", self.request)
        monkeypatch.setattr(ptrace, "status", lambda tid: SimpleNamespace(state="S", tracer=0))
        monkeypatch.setattr(os, "waitpid", lambda tid, flags: (tid, self.states.pop(0)))
        self.memory = SimpleNamespace(pid=os.getpid())

    def request(self, number, tid, address=0, data=0):
        self.requests.append(number)
        if number in {ptrace.GETREGSET, ptrace.SETREGSET}:
            self._exchange(number, address, ptrace._Iovec.from_address(data))
        elif number == ptrace.CONT:
            self.entered.append(list(self.registers))
            self.states.append(self.run(self.registers) << 8 | 0x7F)
            self.floating_before, self.floating = self.floating, b"\xee" * len(self.floating)

    def _exchange(self, number, note, vector):
        if note not in {1, self.note}:
            raise OSError(22, "EINVAL")
        if number == ptrace.GETREGSET:
            data = REGISTERS.pack(*self.registers) if note == 1 else self.floating
            ctypes.memmove(vector.base, data, len(data))
            vector.length = len(data)
        elif note == 1:
            assert vector.length == REGISTERS.size
            self.registers = list(REGISTERS.unpack(ctypes.string_at(vector.base, vector.length)))
        else:
            self.floating = ctypes.string_at(vector.base, vector.length)

    def _return(self, registers):
        registers[0], registers[PC] = 0xFFFF_FFFF_0000_0001, registers[30]  # an int: the upper half means nothing
        return signal.SIGSEGV


def stopped(kernel):
    thread = aarch64.ArmThread(kernel.memory)
    thread.stop(60)
    assert kernel.requests[:2] == [ptrace.SEIZE, ptrace.INTERRUPT]
    return thread


@pytest.mark.parametrize("floating", [None, bytes(range(200)) + bytes(600)], ids=["without-sve", "sve"])
def test_a_call_has_its_arguments_and_a_stack_and_the_thread_gets_all_back(monkeypatch, floating):
    kernel = Kernel(monkeypatch, floating)
    saved = kernel.floating
    thread = stopped(kernel)
    assert thread.ask(FUNCTION) == 1
    thread.call(FUNCTION, 7, 8)
    thread.release()
    for registers, given in zip(kernel.entered, ([0, 0x1111], [7, 8]), strict=True):
        assert registers[:2] == given
        assert registers[2:30] == kernel.before[2:30]
        assert (registers[30], registers[PC]) == (RETURNS_TO, FUNCTION)
        assert registers[SP] % 16 == 0
        assert 0 < kernel.before[SP] - registers[SP] <= 272
        assert registers[PSTATE] == 0x8000_0000, "no kind of branch: BTI would refuse the function"
    assert (kernel.registers, kernel.floating) == (kernel.before, saved)
    assert kernel.requests[-1] == ptrace.DETACH


def test_memory_is_asked_of_the_c_library(monkeypatch):
    kernel = Kernel(monkeypatch)
    thread = stopped(kernel)
    assert thread.map_memory(FUNCTION, 8192) == 0xFFFF_FFFF_0000_0001
    assert kernel.entered[0][:6] == [0, 8192, 3, 0x22, 2**64 - 1, 0]
    kernel.run = lambda registers: registers.__setitem__(0, 2**64 - 1) or registers.__setitem__(PC, RETURNS_TO) or 11
    with pytest.raises(AttachError) as caught:
        thread.map_memory(FUNCTION, 8192)
    assert caught.value.reason == "no-memory"
    thread.release()


@pytest.mark.parametrize(("number", "at"), [(signal.SIGSEGV, FUNCTION + 4), (signal.SIGILL, RETURNS_TO)])
def test_a_fault_that_is_not_the_return_is_told_and_the_thread_goes_on(monkeypatch, number, at):
    kernel = Kernel(monkeypatch, run=lambda registers: registers.__setitem__(PC, at) or number)
    thread = stopped(kernel)
    with pytest.raises(AttachError, match=f"failed with {number.name} at {at:#x}") as caught:
        thread.ask(FUNCTION)
    assert caught.value.reason == "fault"
    thread.release()
    assert kernel.registers == kernel.before


def test_a_thread_in_streaming_mode_is_left_as_it_is(monkeypatch):
    header = struct.pack("<IIHHHH", 16, 16, 16, 16, 0, 0)  # struct user_sve_header, and nothing after it
    kernel = Kernel(monkeypatch, header)
    thread = aarch64.ArmThread(kernel.memory)
    with pytest.raises(AttachError, match="SME") as caught:
        thread.stop(60)
    assert caught.value.reason == "blocked"
    thread.release()
    assert ptrace.SETREGSET not in kernel.requests
    assert kernel.requests[-1] == ptrace.DETACH


@ON_ARM
def test_the_calls_of_an_attach_run_on_this_processor(monkeypatch, tmp_path):
    """All that the injector calls: is Python initialized, map memory, queue code, which the interpreter then runs."""
    library = ctypes.PyDLL(str(compiled("aarch64_calls.c", tmp_path / "calls.so", "-shared", "-fPIC")))
    stack = ctypes.create_string_buffer(1 << 18)
    regular = (ctypes.c_uint64 * 34)()

    def run(registers):
        regular[:] = registers
        number = library.run(regular)
        registers[:] = regular
        return number

    sp = ctypes.addressof(stack) + len(stack) - 1000
    python = interpreter.find(own_memory(), proc.maps(os.getpid()))
    kernel = Kernel(monkeypatch, run=run, registers=[*(0x1111 * n for n in range(31)), sp, 0x40_0000, 0])
    thread = stopped(kernel)
    assert thread.ask(python.symbols[interpreter.INITIALIZED]) == 1
    place = thread.map_memory(python.symbols["mmap"], mailbox.DATA)
    text = b"import sys; sys.hookd_ran_on_arm = True\n\0"
    ctypes.memmove(place, text, len(text))
    thread.call(python.symbols[interpreter.QUEUE], python.symbols[interpreter.EVALUATE], place)
    thread.release()
    assert [registers[30] for registers in kernel.entered] == [RETURNS_TO] * 3
    assert (kernel.registers, len(kernel.entered)) == (kernel.before, 3)
    import sys

    ctypes.pythonapi.Py_MakePendingCalls()
    assert sys.__dict__.pop("hookd_ran_on_arm") is True
