"""The code that is injected, run in this process."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import types

from hookd.tool.inject import mailbox, queued_source
from hookd.tool.linux import proc
from tests.support.processes import wait_until
from tests.support.stub import own_memory

SIZE = 2 * mmap.PAGESIZE
PRIVATE, READ_WRITE = 0x2, 3
NAME = "a-mailbox-of-this-test"
"""This name identifies it, even if the process maps something else at the same address after it was given back."""


def test_it_has_set_the_state_before_it_counts_itself(monkeypatch):
    """In the other order, a tool may see that it ran but not that it started, and queue it again: the first page stays."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    libc = proc.libc()
    libc.mmap.restype = ctypes.c_void_p
    file = os.memfd_create(NAME)
    os.truncate(file, SIZE)
    address = libc.mmap(None, ctypes.c_size_t(SIZE), READ_WRITE, PRIVATE, file, ctypes.c_long(0))
    os.close(file)
    assert is_mapped()
    box = mailbox.MemoryBox(own_memory(), address)
    box.write(0, mailbox.opening(7, SIZE))
    seen = []

    def look(*_):
        seen.append((mailbox.word(box, mailbox.RAN), mailbox.word(box, mailbox.STATE)))
        return look

    code = queued_source.code(os.getpid(), 7, wait_s=60).replace("@BOX@", str(address))
    before = sys.gettrace()
    sys.settrace(look)
    try:
        exec(code, {})
    finally:
        sys.settrace(before)
    assert (1, 0) not in seen
    assert mailbox.word(box, mailbox.RAN) == 1
    wait_until(lambda: mailbox.word(box, mailbox.STATE) == mailbox.RUNS, what="the thread")
    box.write(mailbox.CANCELLED, struct.pack("<Q", 1))
    wait_until(lambda: not is_mapped(), what="it is given back")


def is_mapped():
    return any(NAME in one.path for one in proc.maps(os.getpid()))
