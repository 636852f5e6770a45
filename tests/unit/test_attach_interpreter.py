"""Facts about an interpreter that are read from memory alone, on images made for it."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import struct

import pytest

from hookd.tool.inject import elf, interpreter
from hookd.tool.inject.interpreter import DEBUG_COOKIE, RUNTIME
from hookd.tool.linux.proc import Mapping
from tests.support import emulated
from tests.support.stub import own_memory


@pytest.mark.parametrize(
    ("version", "cookie", "flag", "is_free"),
    [
        ((3, 13), DEBUG_COOKIE, 1, True),
        ((3, 14), DEBUG_COOKIE, 1, True),
        ((3, 13), DEBUG_COOKIE, 0, False),
        ((3, 14), b"whatever", 1, False),
        ((3, 12), DEBUG_COOKIE, 1, False),
    ],
)
def test_a_free_threaded_build_is_known_by_its_debug_offsets(version, cookie, flag, is_free):
    image = ctypes.create_string_buffer(struct.pack("<8sQQ", cookie, version[0] << 24 | version[1] << 16, flag), 24)
    symbols = {RUNTIME: ctypes.addressof(image)}
    assert interpreter._is_free_threaded(own_memory(), version, symbols) is is_free
    assert interpreter._is_free_threaded(own_memory(), version, {}) is False


def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_code_is_found_across_portions_and_not_beyond_what_is_searched(monkeypatch):
    monkeypatch.setattr(interpreter, "_PORTION", 4096)
    monkeypatch.setattr(interpreter, "_MOST_CODE", 3 * 4096)
    memory = mmap.mmap(-1, 4 * 4096)
    start = address_of(memory)
    mappings = [Mapping(start, start + len(memory), "r-xp", 0, "/libc.so.6")]
    for place, found in ((0, 0), (4094, 4094), (3 * 4096 - 3, 3 * 4096 - 3), (3 * 4096, None)):
        memory[:] = bytes(len(memory))
        memory[place : place + 3] = interpreter._SYSCALL_RET
        at = interpreter._code(own_memory(), "/libc.so.6", mappings, interpreter._SYSCALL_RET)
        assert at == (0 if found is None else start + found)


@emulated.lacks("memory")
def test_a_library_of_many_gigabytes_is_not_copied():
    fd = os.memfd_create("libc.so.6")
    os.ftruncate(fd, 1 << 36)
    memory = mmap.mmap(fd, 1 << 36, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    start = address_of(memory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mappings = [Mapping(start, start + (1 << 36), "r-xp", 0, "/libc.so.6")]
    assert interpreter._code(own_memory(), "/libc.so.6", mappings, interpreter._SYSCALL_RET) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def endless_image(memory):
    """Write an ELF image whose only symbol table claims the largest possible length, and has no names."""
    base, table = address_of(memory), 4096
    memory[:64] = struct.pack("<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    memory[64:120] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 4096, 4096, 4096)
    memory[120:176] = struct.pack("<IIQQQQQQ", 2, 6, 256, 256, 256, 64, 64, 8)
    memory[256:320] = struct.pack("<8Q", 4, base + 512, 5, base + 1024, 6, base + table, 0, 0)
    memory[512:520] = struct.pack("<II", 1, 0xFFFFFFFF)
    return base


def test_a_target_of_endless_libraries_is_given_up(monkeypatch):
    monkeypatch.setattr(interpreter, "_SEARCH_S", 2.0)
    looked_at, image, seconds = [], elf.Image, itertools.count()
    monkeypatch.setattr(elf, "Image", lambda memory, start: looked_at.append(start) or image(memory, start))
    memory = mmap.mmap(-1, 4096 + 24 * (1 << 17))
    base = endless_image(memory)
    images = [Mapping(base, base + 4096, "r-xp", 0, f"/libpython{n}.so") for n in range(1000)]
    found = interpreter._search(own_memory(), images, interpreter._NEEDED, lambda _: 0, lambda: next(seconds))
    assert found == (None, {})
    assert len(looked_at) == 2, "one a second, by that clock"
