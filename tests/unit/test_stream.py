"""The memory through which a plugin's records reach a tool."""

from __future__ import annotations

import os

import pytest

from hookd.errors import ControlError
from hookd.wire.stream import DATA, StreamReader, StreamWriter

SIZE = DATA + 4096


@pytest.fixture
def memory():
    number = os.memfd_create("hookd-test-stream")
    os.ftruncate(number, SIZE)
    yield number
    os.close(number)


@pytest.fixture
def both(memory):
    reader = StreamReader(memory, SIZE)
    writer = StreamWriter(memory, SIZE)
    yield reader, writer
    writer.close()
    reader.close()


def test_records_arrive_whole_and_in_order_however_often_the_ring_wraps(both):
    reader, writer = both
    for size in range(1500):
        record = bytes([size % 251]) * size
        assert writer.write(record)
        assert writer.write(b"next")
        assert list(reader.records()) == [record, b"next"]
    assert reader.dropped == 0


def test_a_record_without_room_is_dropped_and_counted_and_the_others_stay(both):
    reader, writer = both
    assert writer.write(b"a" * 2000)
    assert writer.write(b"b" * 2000)
    assert not writer.write(b"c" * 2000)
    assert not writer.write(b"d" * 5000)
    assert [record[:1] for record in reader.records()] == [b"a", b"b"]
    assert reader.dropped == 2
    assert writer.write(b"e" * 2000)
    assert [record[:1] for record in reader.records()] == [b"e"]


def test_what_was_written_last_is_read_after_the_writer_is_gone(memory):
    reader = StreamReader(memory, SIZE)
    if (child := os.fork()) == 0:
        StreamWriter(memory, SIZE).write(b"the last words")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert list(reader.records()) == [b"the last words"]
    reader.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda words, _: words.__setitem__(2, 1 << 63),
        lambda words, _: words.__setitem__(2, 5000),
        lambda _, data: data.__setitem__(slice(0, 4), b"\xff\xff\xff\xff"),
        lambda _, data: data.__setitem__(slice(0, 4), b"\x09\0\0\0"),
        lambda _, data: data.__setitem__(8, data[8] ^ 1),
    ],
    ids=["far", "beyond-the-ring", "long", "longer-than-written", "changed"],
)
def test_a_target_that_writes_something_else_is_an_error_and_nothing_worse(both, write):
    reader, writer = both
    writer.write(b"a record")
    write(writer._words, memoryview(writer._memory)[DATA:])
    with pytest.raises(ControlError, match="something else"):
        list(reader.records())


def test_memory_that_is_not_a_stream_is_refused(memory):
    with pytest.raises(ControlError, match="not a stream"):
        StreamWriter(memory, SIZE)
