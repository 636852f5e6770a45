"""The effect of a seccomp filter is predicted without making the system call; the kernel itself confirms it."""

from __future__ import annotations

import platform
import struct
import subprocess
import sys
import tracemalloc

import pytest

from hookd.tool.inject import seccomp

ALLOW, ERRNO, KILL, KILL_THREAD, TRAP = 0x7FFF0000, 0x00050001, 0x80000000, 0, 0x00030000
NUMBER, ARCHITECTURE, FIRST = 0, 4, 16
MACHINE = platform.machine()
HERE = seccomp._ARCHITECTURES[MACHINE]


def op(code, value, yes=0, no=0):
    return (code, yes, no, value)


def only(action, *numbers):
    return [op(0x20, NUMBER), *(part for n in numbers for part in (op(0x15, n, 0, 1), op(6, action))), op(6, ALLOW)]


@pytest.mark.parametrize("action", [KILL, KILL_THREAD, TRAP])
def test_a_filter_that_kills_is_known_by_the_calls(action):
    number = seccomp.CALLS[MACHINE]["memfd_create"][0]
    assert seccomp.deadly([only(action, number)], MACHINE) == ["memfd_create"]
    assert seccomp.deadly([only(ERRNO, number)], MACHINE) == []
    assert seccomp.deadly([only(ERRNO, number), only(action, number)], MACHINE) == ["memfd_create"]
    assert seccomp.deadly([], MACHINE) == []


def test_a_list_of_what_is_allowed_is_understood():
    numbers = [call[0] for name, call in seccomp.CALLS[MACHINE].items() if name != "socket"]
    allowed = [op(0x20, NUMBER), *(op(0x15, n, len(numbers) - i, 0) for i, n in enumerate(numbers)), op(6, KILL)]
    assert seccomp.deadly([[*allowed, op(6, ALLOW)]], MACHINE) == ["socket"]


def test_arguments_and_the_architecture_count():
    number = seccomp.CALLS[MACHINE]["socket"][0]
    inet_only = [
        op(0x20, ARCHITECTURE), op(0x15, HERE, 1, 0), op(6, KILL), op(0x20, NUMBER), op(0x15, number, 0, 2),
        op(0x20, FIRST), op(0x15, 1, 1, 0), op(6, ALLOW), op(6, KILL),
    ]  # fmt: skip
    assert seccomp.deadly([inet_only], MACHINE) == ["socket"]
    assert seccomp.run(inet_only, number, HERE, [2]) == ALLOW
    assert seccomp.run(inet_only, 1, HERE + 1) == KILL


def test_shifts_without_end_take_neither_time_nor_memory():
    doubled = [op(0x6C, 0), op(0x7C, 0), op(0x6C, 0)] * 1000
    tracemalloc.start()
    try:
        assert seccomp.run([op(0x01, 0xFFFFFFFF), op(0x00, 1), *doubled, op(6, ALLOW)], 0, HERE) == ALLOW
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


PROGRAMS = {
    "tree": [op(0x20, NUMBER), op(0x35, 100, 1, 0), op(6, ALLOW), op(0x25, 200, 0, 1), op(6, ALLOW), op(6, ERRNO | 7)],
    "arithmetic": [
        op(0x20, NUMBER), op(0x02, 3), op(0x54, 0xF), op(0x07, 0), op(0x60, 3), op(0x1C, 0), op(0x74, 4),
        op(0x15, 6, 0, 1), op(6, ERRNO | 9), op(6, ALLOW),
    ],
    "bits": [op(0x20, NUMBER), op(0x45, 0x40, 0, 1), op(6, ERRNO | 3), op(0x05, 0), op(6, ALLOW)],
    "shifts": [
        op(0x20, NUMBER), op(0x07, 0), op(0x00, 1), op(0x6C, 0), op(0x15, 1 << (39 & 31), 0, 1), op(6, ERRNO | 4),
        op(0x00, 1 << 31), op(0x7C, 0), op(0x15, 1 << 31 >> (102 & 31), 0, 1), op(6, ERRNO | 6), op(6, ALLOW),
    ],
    "index": [op(0x01, 102), op(0x20, NUMBER), op(0x1D, 0, 0, 1), op(6, ERRNO | 5), op(0x87, 0), op(6, ALLOW)],
}  # fmt: skip
ASK = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
text = ctypes.create_string_buffer(bytes.fromhex(sys.argv[1]))
program = ctypes.create_string_buffer(len(text).to_bytes(1, "little"), 16)
import struct
program = ctypes.create_string_buffer(struct.pack("H6xP", len(bytes.fromhex(sys.argv[1])) // 8, ctypes.addressof(text)), 16)
numbers = [int(word) for word in sys.argv[2].split(",")]
call, get = libc.syscall, ctypes.get_errno
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
answers = []
for number in numbers:
    ctypes.set_errno(0)
    answers.append(get() if call(number, 0, 0, 0, 0, 0, 0) == -1 else 0)
os.write(1, repr(answers).encode())
call(60, 0)  # exit: `_exit` calls exit_group alone since glibc 2.42, and a program may forbid that
"""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.skipif(MACHINE != "x86_64", reason="numbers of harmless system calls of x86_64")
def test_the_kernel_answers_the_same(program):
    harmless = [39, 102, 104, 107, 108, 110, 111, 186]  # getpid and the like
    output = [seccomp.run(program, number, HERE) for number in harmless]
    text = b"".join(struct.pack("<HBBI", code, yes, no, value) for code, yes, no, value in program)
    done = subprocess.run(
        [sys.executable, "-c", ASK, text.hex(), ",".join(map(str, harmless))],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stdout.decode() == repr([answer & 0xFFFF if answer != ALLOW else 0 for answer in output])
