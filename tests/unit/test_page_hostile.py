"""Pages that lie: a reader answers with a snapshot or a PageError, soon, and with nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookd.errors import PageError
from hookd.wire.page import MIN_SIZE, PageReader, PageWriter, Record, Snapshot, layout
from hookd.wire.page.log import frame
from tests.support.calls import calls_counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGIONS = layout.divide(MIN_SIZE)
MOST_CALLS = 3_000_000
"""What one page can make a reader do at most, in calls of functions."""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def contents(page: PageWriter) -> bytes:
    return os.pread(page.fd, MIN_SIZE, 0)


@pytest.fixture(scope="module")
def valid() -> bytes:
    """The bytes of a page with something of everything."""
    page = PageWriter.create({"pid": 1, "run": "charlm"}, size=MIN_SIZE)
    counter = page.family("hookd_calls", "counter", "Calls.", ("module",))
    seconds = page.family("hookd_seconds", "histogram", "Seconds.", ("phase",), (0.1, 1.0))
    for n in range(20):
        page.cells[page.series(counter, (f"blocks.{n}",))] = n
        page.module(f"blocks.{n}", "Block", 1)
        page.record(1, n, n)
        page.incident({"kind": "nan", "message": f"{n}"})
        page.log("info", f"{n}")
    page.series(seconds, ("forward",))
    page.retire(counter, ("blocks.3",))
    page.thread(7, "MainThread")
    page.set_state("running")
    data = contents(page)
    page.close()
    return data


def memory_file(data: bytes) -> int:
    """Return a memfd of these bytes, without seals."""
    fd = os.memfd_create("hookd-page")
    os.write(fd, data)
    return fd


def read_all(data: bytes | int) -> Snapshot | PageError:
    """Call everything that a reader has, twice; any error but a PageError fails the test, and so does endless work."""
    before = descriptors()
    fd = memory_file(data) if isinstance(data, bytes) else data
    with calls_counted() as made:
        try:
            reader = PageReader(fd)
        except PageError as exc:
            outcome: Any = exc
        else:
            calls = (reader.identity, reader.state, reader.heartbeats, reader.records, reader.read)
            for call in calls * 2:
                outcome = outcome_of(call)
            reader.close()
    assert not isinstance(outcome, PageError) or outcome.reason in ("corrupt", "protocol")
    assert descriptors() == before - (not isinstance(data, bytes)), "a page is closed, a refused one too"
    assert made[0] < MOST_CALLS
    return outcome


def outcome_of(call: Callable[[], object]) -> object:
    try:
        result = call()
    except PageError as exc:
        return exc
    check_types(result)
    return result


def check_types(outcome: object) -> None:
    """Whatever is returned can be rendered, stored and printed."""
    if isinstance(outcome, list):
        assert all(record.seq > 0 for record in outcome if isinstance(record, Record))
    if not isinstance(outcome, Snapshot):
        return
    json.dumps([outcome.identity, outcome.incidents, outcome.logs], allow_nan=False).encode()
    for family in outcome.families:
        assert layout.Declaration(family.name, family.kind, family.help, family.labels, family.buckets).check()
        for series in family.series:
            assert len(series.cells) == family.width
            assert len(series.values) == len(family.labels)
            "".join((family.help, *series.values)).encode()
    for entry in outcome.modules.values():
        f"{entry.name}{entry.type}".encode()
    for incident in outcome.incidents + outcome.logs:
        assert isinstance(incident["seq"], int)
        time.gmtime(incident["time"])
    assert all(isinstance(number, int) for beat in outcome.heartbeats for number in (beat.tid, beat.step))


def forged(valid: bytes, name: str, payloads: list[bytes], *, framed: bool = True) -> bytes:
    """Return the page with other contents of one log, checksums and lengths right."""
    data = b"".join(map(frame, payloads)) if framed else b"".join(payloads)
    region = REGIONS[name]
    assert len(data) <= region.length // 2
    head = layout.HEAD_WORDS[name] * 8
    page = bytearray(valid)
    page[region.offset : region.offset + len(data)] = data
    page[head : head + 8] = struct.pack("=Q", len(data))
    return bytes(page)


def test_the_valid_page_is_read(valid):
    snapshot = read_all(valid)
    assert isinstance(snapshot, Snapshot)
    assert len(snapshot.families[0].series) == 19


@given(data=st.binary(max_size=3 * 4096))
@settings(deadline=None)
def test_random_bytes(data):
    assert isinstance(read_all(data), PageError)


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_random_bytes_behind_a_true_header(valid, seed):
    noise = random.Random(seed).randbytes(MIN_SIZE - layout.HEADER_BYTES)
    read_all(valid[: layout.HEADER_BYTES] + noise)


@pytest.fixture(scope="module")
def places(valid: bytes) -> list[int]:
    """Where a change can matter: the bytes in use, and those near them."""
    return [start + n for start in range(0, MIN_SIZE, 512) if any(valid[start : start + 512]) for n in range(512)]


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_valid_page_with_changed_bytes(valid, places, data):
    page = bytearray(valid)
    for place in data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=8)):
        page[places[place]] = data.draw(st.integers(0, 255))
    read_all(bytes(page))


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_valid_page_with_changed_words(valid, data):
    """Lengths, offsets and cells of any value, everywhere in the header and at the start of each region."""
    words = [*range(40), *(region.offset // 8 + n for region in REGIONS.values() for n in range(12))]
    page = bytearray(valid)
    extreme = st.sampled_from(
        [0, 1, 7, 8, MIN_SIZE - 8, MIN_SIZE, 2**31, 2**32 - 8, 2**32, 2**63, 2**64 - 1, 0x7FF8 << 48]
    )
    for word in data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=4)):
        page[word * 8 : word * 8 + 8] = struct.pack("=Q", data.draw(extreme | st.integers(0, 2**64 - 1)))
    read_all(bytes(page))


@pytest.mark.parametrize(
    "size", [0, 1, 8, 320, 4095, 4096, 8192, MIN_SIZE // 2, MIN_SIZE - 4096, MIN_SIZE - 1, MIN_SIZE + 1]
)
def test_a_page_that_is_cut_or_longer_than_it_says(valid, size):
    outcome = read_all(valid[:size].ljust(size, b"\0"))
    assert isinstance(outcome, PageError)
    assert outcome.hint


def test_a_page_that_is_not_written_yet(valid):
    outcome = read_all(bytes(8) + valid[8:])
    assert "not written yet" in str(outcome)


def test_a_page_of_another_protocol(valid):
    outcome = read_all(valid[:8] + struct.pack("=Q", 99) + valid[16:])
    assert isinstance(outcome, PageError)
    assert outcome.reason == "protocol"


def test_what_is_no_memory_file_is_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    pipe, other_end = os.pipe()
    for fd in (
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
        os.open("/dev/zero", os.O_RDONLY),
        os.open("/", os.O_RDONLY),
        os.open("/proc/self/mem", os.O_RDONLY),
        pipe,
    ):
        assert isinstance(read_all(fd), PageError)
    os.close(other_end)
    with pytest.raises(PageError):
        PageReader(12345)


HOSTILE_RECORDS = [
    b"[" * 12000,
    b"{" * 12000,
    b'{"a":' * 2000,
    b"[" * 5000 + b"]" * 5000,
    b"null",
    b"0",
    b"NaN",
    b'"s"',
    b"[]",
    b"{}",
    b'["s"]',
    b'["s",1]',
    b'["s",1,2,3]',
    b'["s",[],2,[]]',
    b'["s",1,NaN,["a"]]',
    b'["s",1,Infinity,["a"]]',
    b'["s",1,1e400,["a"]]',
    b'["s",1,true,["a"]]',
    b'["s",1,-1,["a"]]',
    b'["s",1,0,["a"]]',
    b'["s",1,999999999,["a"]]',
    b'["s",1,1' + b"0" * 8000 + b',["a"]]',
    b'["s",1,"400000",["a"]]',
    b'["s",1,400000,[1]]',
    b'["s",1,400000,["a","b"]]',
    b'["s",1,400000,["' + b"a" * 2000 + b'"]]',
    b'["s",1,400000,["\\ud800"]]',
    b'["s",77,400000,["a"]]',
    b'["s",1,400000,["\xff"]]',
    b'["zzz",1]',
    b"[[],1]",
    b'["f",1,"hookd_x","counter","",["a\\nb"],[]]',
    b'["f",9,"hookd_x\\n","counter","",[],[]]',
    b'["f",9,"hookd_x{","counter","",[],[]]',
    b'["f",9,"hookd_\xc3\xbc","counter","",[],[]]',
    b'["f",9,"hookd_x","counter",7,[],[]]',
    b'["f",9,"hookd_x",[],"",[],[]]',
    b'["f",9,7,"counter","",[],[]]',
    b'["f",9,"hookd_x","counter","",7,[]]',
    b'["f",9,"hookd_x","counter","",[[]],[]]',
    b'["f",9,"hookd_x","histogram","",[],[NaN]]',
    b'["f",9,"hookd_x","histogram","",[],["a"]]',
    b'["f",9,"hookd_x","histogram","",[],[2,1]]',
    b'["f",9,"hookd_x","histogram","",[],{"a":1}]',
    b'["f",9,"hookd_x","histogram","",[],[1' + b"0" * 4000 + b"]]",
    b'["f",9,"hookd_x","histogram","",[],' + json.dumps(list(range(1000))).encode() + b"]",
    b'["f",[],"hookd_x","counter","",[],[]]',
    b'["f",1.5,"hookd_x","counter","",[],[]]',
    b'["-s",1,7]',
    b'["m",1,2,3,4]',
    b'["m",[],"a","A",1]',
    b'["m",1,"a","A",null]',
    b'["s",1',
    b"\xff\xfe",
]


@pytest.mark.parametrize("record", HOSTILE_RECORDS, ids=lambda record: record[:40].decode("ascii", "replace"))
def test_a_hostile_record_is_refused_in_every_log(valid, record):
    family = b'["f",1,"hookd_calls","counter","",["module"],[]]'
    for name in ("schema", "incidents", "logs", "identity"):
        read_all(forged(valid, name, [family, record]))
    assert isinstance(read_all(forged(valid, "schema", [family, record])), PageError)


@pytest.mark.parametrize(
    "record", [b'["-s",1,[[]]]', b'["-m",{}]', b'["-f",[]]', b'["-m",1]', b'["s",1,400000,["a"]],["s",1,400000,["b"]]']
)
def test_nonsense_that_does_nothing_is_refused_or_passed_over(valid, record):
    read_all(forged(valid, "schema", [b'["f",1,"hookd_calls","counter","",["module"],[]]', record]))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=9)
    | st.sampled_from(["f", "s", "-f", "-s", "m", "-m", "hookd_x", "counter", "histogram", 1, 2, 400_000]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
tags = st.sampled_from(["f", "s", "-f", "-s", "m", "-m"])
likely = (
    st.tuples(st.just("f"), st.integers(1, 3), st.sampled_from(["hookd_x", "hookd_y"]), st.sampled_from(layout.KINDS),
              st.just("X."), st.lists(st.sampled_from("ab"), max_size=2), st.lists(st.integers(0, 3), max_size=2))
    | st.tuples(st.just("s"), st.integers(1, 3), st.integers(377_000, 525_000), st.lists(st.sampled_from("uv"), max_size=2))
    | st.tuples(st.just("-s"), st.integers(1, 3), st.lists(st.sampled_from("uv"), max_size=2))
    | st.tuples(st.just("-f"), st.integers(1, 3))
    | st.tuples(st.just("m"), st.integers(1, 3), st.just("a"), st.just("A"), st.just(1))
    | st.tuples(st.just("-m"), st.integers(1, 3))
    | st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(json_values, max_size=6))
)  # fmt: skip


@given(records=st.lists(likely | json_values, max_size=12), name=st.sampled_from(sorted(layout.HEAD_WORDS)))
@settings(deadline=None, max_examples=200)
def test_records_of_any_content_with_right_checksums(valid, records, name):
    read_all(forged(valid, name, [json.dumps(record).encode()[: layout.MAX_RECORD - 16] for record in records]))


def test_series_may_share_cells_and_harm_nobody_else(valid):
    first = REGIONS["values"].offset // 8
    records = [["f", 1, "hookd_h", "histogram", "", ["n"], [1, 2]]]
    records += [["s", 1, first + n, [str(n)]] for n in range(100)]
    snapshot = read_all(forged(valid, "schema", [json.dumps(record).encode() for record in records]))
    assert isinstance(snapshot, Snapshot)
    assert len(snapshot.families[0].series) == 100


def test_the_last_cell_of_the_page_can_be_read_and_none_beyond(valid):
    family = b'["f",1,"hookd_x","gauge","",[],[]]'
    last = MIN_SIZE // 8 - 1
    assert isinstance(read_all(forged(valid, "schema", [family, b'["s",1,%d,[]]' % last])), Snapshot)
    assert isinstance(read_all(forged(valid, "schema", [family, b'["s",1,%d,[]]' % (last + 1)])), PageError)


def test_later_records_win_as_after_an_interrupted_writer(valid):
    first = REGIONS["values"].offset // 8
    records = [
        ["f", 1, "hookd_x", "gauge", "", ["n"], []],
        ["f", 2, "hookd_x", "gauge", "", ["n"], []],
        ["s", 2, first + 5, ["a"]],
        ["s", 2, first + 6, ["a"]],
    ]
    page = bytearray(forged(valid, "schema", [json.dumps(record).encode() for record in records]))
    page[(first + 6) * 8 : (first + 7) * 8] = struct.pack("=d", 42.0)
    snapshot = read_all(bytes(page))
    assert isinstance(snapshot, Snapshot)
    assert [family.series for family in snapshot.families] == [[(("a",), (42.0,))]]


def test_a_bad_tail_means_not_yet(valid):
    family, series = b'["f",1,"hookd_x","gauge","",["n"],[]]', b'["s",1,%d,["a"]]' % (REGIONS["values"].offset // 8)
    whole = forged(valid, "schema", [family, series])
    end = REGIONS["schema"].offset + len(frame(family) + frame(series))
    torn = bytearray(whole)
    torn[end - 8 : end] = bytes(8)  # the head has moved, the last bytes have not arrived
    fd = memory_file(bytes(torn))
    reader = PageReader(os.dup(fd))
    assert reader.read().families[0].series == []
    os.pwrite(fd, whole[end - 8 : end], end - 8)
    assert [series.values for series in reader.read().families[0].series] == [("a",)]
    reader.close()
    os.close(fd)


def test_a_late_tail_of_incidents_is_not_missed(valid):
    payloads = [json.dumps({"seq": n, "time": 1.0}).encode() for n in range(2)]
    whole = forged(valid, "incidents", payloads)
    at = REGIONS["incidents"].offset + len(frame(payloads[0]))
    fd = memory_file(whole[:at] + bytes(8) + whole[at + 8 :])
    reader = PageReader(os.dup(fd))
    assert len(reader.read().incidents) == 1
    os.pwrite(fd, whole[at : at + 8], at)
    assert len(reader.read().incidents) == 2
    reader.close()
    os.close(fd)


def test_a_page_full_of_tiny_records_takes_bounded_time(valid):
    room = REGIONS["schema"].length // 2
    family = b'["f",1,"hookd_x","gauge","",[],[]]'
    for tiny in (b"[]", b"1", b'["-m",1]', b'["-f",9]', b'["m",1,"","",1]', b"[[[[[[[]]]]]]]"):
        count = (room - len(frame(family))) // len(frame(tiny))
        read_all(forged(valid, "schema", [family] + [tiny] * count))


def test_numbers_that_are_none_read_as_zero_and_hide_threads(valid):
    page = bytearray(valid)
    base = REGIONS["heartbeat"].offset
    for slot, tid in enumerate([math.nan, math.inf, -1.0, 1e300, 0.5, 3.0]):
        page[base + slot * 64 : base + slot * 64 + 48] = struct.pack(
            "=6d", tid, *[math.nan, math.inf, -1.0, 1e300, 2.5]
        )
    snapshot = read_all(bytes(page))
    assert isinstance(snapshot, Snapshot)
    assert [(beat.tid, beat.module, beat.events, beat.phase, beat.step) for beat in snapshot.heartbeats] == [
        (3, 0, 0, "other", 0)
    ]


def test_a_page_that_shrinks_under_the_reader(valid):
    fd = memory_file(valid)
    reader = PageReader(os.dup(fd))
    good = reader.read()
    for size in (MIN_SIZE - 4096, REGIONS["values"].offset, REGIONS["schema"].offset, 4096, 100, 0):
        os.ftruncate(fd, size)
        for call in (reader.identity, reader.heartbeats, reader.records, reader.read):
            assert getattr(outcome_of(call), "reason", "corrupt") == "corrupt"
    with pytest.raises(PageError, match="shrunk"):
        reader.read()
    assert len(good.families[0].series) == 19
    reader.close()
    os.close(fd)


def test_a_page_of_ours_cannot_be_shrunk_or_grown_or_sealed_further():
    page = PageWriter.create({"pid": 1}, size=MIN_SIZE)
    for size in (0, MIN_SIZE - 4096, MIN_SIZE + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, size)
    page.close()


def test_a_page_that_changes_under_the_reader(valid, places):
    """Another thread scribbles over the page all the time."""
    fd = memory_file(valid)
    stop = threading.Event()

    def scribble() -> None:
        dice = random.Random(1)
        while not stop.is_set():
            place = dice.choice(places)
            os.pwrite(fd, dice.randbytes(8), place)
            if dice.random() < 0.5:
                os.pwrite(fd, valid[place : place + 8], place)
            if dice.random() < 0.05:
                os.pwrite(fd, valid[:4096], 0)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(100):
            read_all(os.dup(fd))
    finally:
        stop.set()
        thread.join()
        os.close(fd)


def test_a_page_that_is_rewritten_all_the_time_gives_the_last_good_copy(valid):
    """Every look at the header finds other flips, as if the writer compacted without end."""

    class Restless(PageReader):
        is_restless = False
        flips = 0

        def _words(self) -> tuple[int, ...]:
            words = list(super()._words())
            if self.is_restless:
                self.flips += 2
                words[layout.HEAD_WORDS["logs"]] += self.flips << 32
            return tuple(words)

    reader = Restless(memory_file(valid))
    reader.is_restless = True
    with pytest.raises(PageError, match="faster"):
        reader.read()
    reader.is_restless = False
    good = reader.read()
    reader.is_restless = True
    assert reader.read() is good
    reader.close()


def test_a_reader_that_is_closed_while_it_is_used(valid):
    for _ in range(20):
        reader = PageReader(memory_file(valid))
        thread = threading.Thread(target=reader.close)
        thread.start()
        with contextlib.suppress(PageError):
            while True:
                reader.read()
        thread.join()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before
