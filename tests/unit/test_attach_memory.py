"""The memory of a target: it is read and written, is that of one program, and is checked before it is written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from hookd.errors import AttachError
from hookd.tool.attach import py_spy as native
from hookd.tool.inject import remote_debug
from hookd.tool.linux import proc
from hookd.tool.linux.memory import Opened
from tests.support.environment import target_environment
from tests.support.pids import reuse_pids
from tests.support.processes import Process, wait_until
from tests.support.stub import own_memory

PAGE = mmap.PAGESIZE
BECOMES = """
import ctypes, os, sys
text = ctypes.create_string_buffer(b"before")
print(ctypes.addressof(text), flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "print('another', flush=True); input()"])
"""


@contextlib.contextmanager
def becoming():
    """Start a process that becomes another program on request, and open its memory before."""
    with Process([sys.executable, "-c", BECOMES], env=target_environment(), stdin=True) as process:
        address = int(process.expect(r"^\d+$")[0])
        with Opened(process.pid, proc.program(process.pid)) as memory:
            yield process, memory, address


def become(process):
    process.send("go")
    process.expect("^another$")


def test_it_is_read_and_written():
    buffer = ctypes.create_string_buffer(b"before", 16)
    address = ctypes.addressof(buffer)
    assert own_memory().read(address, 6) == b"before"
    own_memory().write(address, b"after!")
    assert buffer.value == b"after!"


@pytest.mark.parametrize("address", [PAGE, 1 << 62, (1 << 63) - 1, (1 << 64) - 8, -8])
def test_what_is_not_mapped_is_a_fault(address):
    for act in (lambda: own_memory().read(address, 8), lambda: own_memory().write(address, bytes(8))):
        with pytest.raises(OSError, match="memory of process") as caught:
            act()
        assert caught.value.errno == errno.EFAULT


def test_what_is_mapped_only_in_part_is_a_fault():
    memory = mmap.mmap(-1, 2 * PAGE)
    start = address_of(memory)
    proc.libc().munmap(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(PAGE))
    with pytest.raises(OSError, match="memory of process"):
        own_memory().read(start, 2 * PAGE)


def test_a_process_that_becomes_another_program_is_not_reached_any_more():
    with becoming() as (process, memory, address):
        memory.write(address, b"after!")
        assert memory.read(address, 6) == b"after!"
        become(process)
        start = next(one.start for one in proc.maps(process.pid) if one.access == "rw-p")
        for act in (lambda: memory.read(start, 8), lambda: memory.write(start, bytes(8))):
            with pytest.raises(OSError, match="another program") as caught:
                act()
            assert caught.value.errno == errno.ESRCH
        assert memory.mappings() == []
        with pytest.raises(AttachError) as refused:
            memory.require_private(start, 8)
        assert refused.value.reason == "died"


def test_a_program_that_has_been_replaced_is_not_opened():
    with becoming() as (process, _, _):
        program = proc.program(process.pid)
        become(process)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(AttachError) as caught:
            Opened(process.pid, program)
        assert caught.value.reason == "died"
        assert len(os.listdir("/proc/self/fd")) == len(before)


def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_a_mailbox_may_lie_in_private_anonymous_memory():
    memory = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own_memory().require_private(address_of(memory), len(memory))


def test_it_may_lie_in_several_mappings_that_are_all_such():
    memory = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK, 0, 2 * PAGE)  # the kernel splits them
    own_memory().require_private(address_of(memory), len(memory))


def refused(address, size=PAGE):
    with pytest.raises(AttachError, match="no private writable memory") as caught:
        own_memory().require_private(address, size)
    return caught.value.reason == "memory"


def test_memory_that_others_may_share_is_refused():
    memory = mmap.mmap(-1, PAGE)
    assert refused(address_of(memory))


def test_a_private_copy_of_a_file_is_refused_for_a_mailbox_and_may_hold_an_interpreters_fields():
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        memory = mmap.mmap(file.fileno(), PAGE, mmap.MAP_PRIVATE)
    assert refused(address_of(memory))
    own_memory().require_private(address_of(memory), PAGE, may_be_file=True)


def test_memory_that_its_program_may_not_write_is_refused():
    memory = mmap.mmap(-1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(memory)
    proc.libc().mprotect(ctypes.c_void_p(start + PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ)
    assert refused(start, 2 * PAGE)
    assert refused(start + PAGE)


def test_memory_that_is_not_there_is_refused():
    assert refused(PAGE)
    assert refused((1 << 64) - PAGE)


def test_a_script_is_not_asked_for_through_fields_in_shared_memory():
    memory = mmap.mmap(-1, PAGE)
    start = address_of(memory)
    remote = remote_debug.RemoteDebug(own_memory(), True, start, start + 8, start + 16, 512)
    with pytest.raises(AttachError) as caught:
        remote.run_script("/tmp/hookd.py")
    assert caught.value.reason == "memory"
    assert bytes(memory) == bytes(PAGE)


PY_SPY = """#!{python}
import os, pathlib, sys
pid = sys.argv[sys.argv.index("--pid") + 1]
before = os.stat(f"/proc/{{pid}}/exe").st_ino, pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes()
pathlib.Path({reported!r}).touch()
while before == (os.stat(f"/proc/{{pid}}/exe").st_ino, pathlib.Path(f"/proc/{{pid}}/cmdline").read_bytes()):
    pass
print("[]")
"""


def test_stacks_of_a_process_that_becomes_another_program_meanwhile_are_not_reported(tmp_path, monkeypatch):
    reported = tmp_path / "reported"
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(PY_SPY.format(python=sys.executable, reported=str(reported)))
    py_spy.chmod(0o755)
    monkeypatch.setattr(native, "program", lambda: str(py_spy))
    with becoming() as (process, _, _), ThreadPoolExecutor(1) as pool:
        dumped = pool.submit(native.dump, process.pid)
        wait_until(reported.exists)
        process.send("go")
        with pytest.raises(AttachError) as caught:
            dumped.result(60)
    assert caught.value.reason == "died"


def test_stacks_of_another_process_that_has_the_pid_by_then_are_not_reported(tmp_path, monkeypatch):
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(f"#!{sys.executable}\nprint('[]')\n")
    py_spy.chmod(0o755)
    monkeypatch.setattr(native, "program", lambda: str(py_spy))
    assert native.dump(os.getpid()) == []
    reuse_pids(monkeypatch, after=1)
    with pytest.raises(AttachError) as caught:
        native.dump(os.getpid())
    assert caught.value.reason == "died"
