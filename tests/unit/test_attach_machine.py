"""Machine-level facts of an attach: symbols from memory, registers, signal frames, fields of remote debugging."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hookd.errors import AttachError, NoSuchTarget, PermissionDenied, TargetUnsupported
from hookd.tool.inject import elf, interpreter, mailbox, queued_source
from hookd.tool.linux import permission, proc
from hookd.tool.linux.memory import Opened
from tests.support import emulated
from tests.support.stub import own_memory

ME = os.getpid()
needs_memory = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def test_symbols_are_where_the_dynamic_linker_says():
    found = interpreter.find(own_memory(), proc.maps(ME))
    for name in (interpreter.QUEUE, interpreter.EVALUATE, interpreter.INITIALIZED):
        assert found.symbols[name] == ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert found.version == sys.version_info[:2]


@emulated.lacks("proc")
def test_a_program_without_python_is_said_to_be_none():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            while proc.words(child.pid, "cmdline")[:1] != ["sleep"]:  # set after its auxiliary vector, unlike `exe`
                pass
            with Opened(child.pid, proc.program(child.pid)) as memory, pytest.raises(TargetUnsupported) as caught:
                interpreter.find(memory, memory.mappings())
        finally:
            child.kill()
    assert caught.value.reason == "not-python"


def test_memory_that_is_no_image_is_refused():
    buffer = ctypes.create_string_buffer(b"no image" * 16)
    with pytest.raises(elf.NotElfError):
        elf.Image(own_memory(), ctypes.addressof(buffer))


@pytest.mark.parametrize("junk", [b"\xff", b"\0", b"\x40"])
def test_an_image_that_lies_is_refused(junk):
    """The header is right, the rest is hostile."""
    image = ctypes.create_string_buffer(b"\x7fELF\2\1\1".ljust(16, b"\0") + junk * 4096)
    with pytest.raises((elf.NotElfError, OSError)):
        elf.Image(own_memory(), ctypes.addressof(image)).find(["Py_AddPendingCall"])


def test_a_process_that_is_not_there_is_said_not_to_be():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for look in (proc.status, proc.start_ticks, proc.maps):
        with pytest.raises(NoSuchTarget):
            look(child.pid)


@pytest.mark.parametrize(
    ("rax", "orig_rax", "then"),
    [
        (5, -1, (5, 100)),  # not in a system call
        (0, 35, (0, 100)),  # one that has returned
        (-4, 35, (-4, 100)),  # EINTR, which the program sees
        (-512, 35, (35, 98)),
        (-513, 35, (35, 98)),
        (-514, 35, (35, 98)),
        (-516, 35, (219, 98)),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="registers of x86_64")
def test_an_interrupted_system_call_is_started_again_as_the_kernel_would(rax, orig_rax, then):
    from hookd.tool.inject import x86_64

    saved = x86_64._Registers(rax=rax & (1 << 64) - 1, orig_rax=orig_rax & (1 << 64) - 1, rip=100)
    resumed = x86_64._restarted(saved)
    assert (ctypes.c_int64(resumed.rax).value, resumed.rip) == then
    assert ctypes.c_int64(resumed.orig_rax).value == -1


def xstate(size: int, features: int, in_use: int) -> bytes:
    return bytes(464) + struct.pack("<Q", features) + bytes(40) + struct.pack("<Q", in_use) + bytes(size - 520)


@pytest.mark.parametrize(
    ("size", "features", "in_use", "kept"),
    [
        (2440, 0xE7, 0x7, (0xE7, 2440)),
        (2696, 0x2E7, 0x207, (0x2E7, 2696)),
        (11008, 0x602E7, 0x207, (0x2E7, 2696)),  # AMX exists and is not used: most processes may not have it in a frame
        (11008, 0x602E7, 0x60207, (0x602E7, 11008)),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="extended state of x86_64")
def test_the_extended_state_of_a_signal_frame_says_what_it_holds(size, features, in_use, kept):
    from hookd.tool.inject import x86_64

    frame, is_extended = x86_64._frame_xstate(xstate(size, features, in_use))
    magic, extended, found_features, found_size = struct.unpack_from("<IIQI", frame, 464)
    assert (found_features, found_size) == kept
    assert (is_extended, magic, extended, len(frame)) == (1, 0x46505853, found_size + 4, found_size + 4)
    assert struct.unpack_from("<I", frame, found_size) == (0x46505845,)


def test_the_injected_statement_is_one_line_that_leaves_no_name():
    text = queued_source.at_address(queued_source.statement(queued_source.code(0, 2**64 - 1, 1000.0)), 2**47)
    assert len(text) <= mailbox.DATA - mailbox.CODE
    assert text.endswith(b"\n\0")
    assert text.count(b"\n") == 1
    assert b"@" not in text
    namespace: dict[str, object] = {}
    exec(text[:-1].decode(), namespace)  # no process has pid 0, so it does nothing
    assert set(namespace) == {"__builtins__"}


def test_an_answer_that_is_no_json_is_refused():
    box = SimpleNamespace(
        read=lambda offset, size: b"[1, 2]..."[:6] if offset == mailbox.DATA else (6).to_bytes(8, "little")
    )
    with pytest.raises(ValueError, match="not an object"):
        mailbox.answer(box)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (PermissionError(1, "x"), PermissionDenied, "ptrace-refused"),
        (OSError(38, "x"), PermissionDenied, "seccomp"),
        (OSError(3, "x"), AttachError, "died"),
        (OSError(14, "x"), AttachError, "died"),
        (OSError(5, "x"), AttachError, "unreadable"),
    ],
)
def test_what_the_kernel_says_is_explained(error, kind, reason):
    explained = permission.explain(ME, error)
    assert (type(explained), explained.reason) == (kind, reason)
