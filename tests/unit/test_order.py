"""The order of loads and stores in shared memory. What an ARM processor would do otherwise cannot be seen on x86-64, nor in its emulation."""

from __future__ import annotations

import os
import struct

import pytest

from hookd.errors import PageError
from hookd.wire import order, stream
from hookd.wire.page import PageReader, PageWriter, layout, log, writer


class Memory:
    """Notes stores, and barriers as None; of stores between two barriers another process may see any without the others."""

    def __init__(self, of):
        self._of, self.seen = of, []

    def __setitem__(self, where, value):
        self.seen.append(where)
        self._of[where] = value

    def __getitem__(self, where):
        return self._of[where]

    def barrier(self):
        self.seen.append(None)


@pytest.fixture
def page():
    made = PageWriter.create({"pid": os.getpid()}, size=layout.MIN_SIZE)
    yield made
    made.close()


def test_a_barrier_takes_and_releases_a_free_lock_twice():
    order.through_lock()
    order.barrier()
    assert order.IS_STRONG is (os.uname().machine == "x86_64")


def test_a_record_is_opened_before_and_closed_after_its_cells(page, monkeypatch):
    page.cells = cells = Memory(page.cells)
    monkeypatch.setattr(writer, "barrier", cells.barrier)
    page.record(1, 2, 3, 4.0)
    base = page.recorder[0]
    assert cells.seen == [base, None, *range(base + 1, base + 6), None, base]
    page.cells = cells._of


def test_a_thread_has_its_name_and_zeros_before_its_id(page, monkeypatch):
    page.cells = cells = Memory(page.cells)
    monkeypatch.setattr(writer, "barrier", cells.barrier)
    base = page.thread(7, "worker")
    assert cells.seen[-2:] == [None, base + layout.TID]
    page.cells = cells._of


def test_a_head_follows_its_records_and_old_records_are_gone_after_it(monkeypatch):
    words = Memory([0] * 40)
    memory = Memory(bytearray(1 << 12))
    memory.madvise = lambda *_: memory.seen.append("removed")
    memory.seen = words.seen
    monkeypatch.setattr(log, "barrier", words.barrier)
    one = log.Log(memory, words, "schema", layout.Region(0, 1 << 12))
    head = layout.HEAD_WORDS["schema"]
    one.append(b"[]")
    assert [type(where) for where in words.seen] == [slice, type(None), int]
    one.replace([b"[]"])
    assert words.seen[4:] == [None, head, None, "removed"]


def test_the_magic_word_is_the_last_of_a_page_and_a_reader_loads_the_others_after_it(page, monkeypatch):
    fd = os.dup(page.fd)
    copies = []

    def words(reader):
        """Return what a first copy may have on ARM: the magic word, and of the others what was there before."""
        full = list(layout.WORDS.unpack(os.pread(fd, layout.WORDS.size, 0)))
        copies.append(full if copies else [full[0]] + [0] * (len(full) - 1))
        return tuple(copies[-1])

    monkeypatch.setattr(PageReader, "_words", words)
    reader = PageReader(fd)
    assert reader.identity()["pid"] == os.getpid()
    reader.close()
    assert copies[0] != copies[1]


def test_a_page_without_a_magic_word_is_not_written_yet():
    fd = os.memfd_create("none", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.MIN_SIZE)
    with pytest.raises(PageError, match="not written yet"):
        PageReader(fd)


def test_the_bytes_of_a_stream_are_there_before_the_word_and_loaded_after_it(monkeypatch):
    fd = os.memfd_create("stream")
    os.ftruncate(fd, size := stream.DATA + 4096)
    reader, seen = stream.StreamReader(fd, size), []
    target = stream.StreamWriter(fd, size)

    def barrier():
        seen.append((target._words[stream._WRITTEN], bytes(target._memory[stream.DATA + 8 : stream.DATA + 11])))

    monkeypatch.setattr(stream, "barrier", barrier)
    assert target.write(b"abc")
    assert list(reader.records()) == [b"abc"]
    assert seen == [(0, b"abc"), (struct.calcsize("=II") + 3, b"abc")]
    target.close()
    reader.close()
    os.close(fd)
