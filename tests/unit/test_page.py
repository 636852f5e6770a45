"""The page, written and read in one process: every value is read back as it was written."""

from __future__ import annotations

import math
import os
import posix
import struct
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hookd.wire import page
from hookd.wire.page import MIN_SIZE, PageReader, PageWriter, layout, log, series
from hookd.wire.page.reader import TRIES

if TYPE_CHECKING:
    from collections.abc import Iterator


def read_end(written: PageWriter) -> PageReader:
    return PageReader(os.open(f"/proc/self/fd/{written.fd}", os.O_RDONLY))


@pytest.fixture
def written() -> Iterator[PageWriter]:
    made = PageWriter.create({"pid": os.getpid(), "run": "charlm"}, size=MIN_SIZE)
    yield made
    made.close()


@pytest.fixture
def reader(written: PageWriter) -> Iterator[PageReader]:
    made = read_end(written)
    yield made
    made.close()


def cells_of(reader: PageReader, name: str) -> dict[tuple[str, ...], tuple[float, ...]]:
    (family,) = [family for family in reader.read().families if family.name == name]
    return {series.values: series.cells for series in family.series}


def test_a_new_page_says_who_and_what_state(written, reader):
    assert reader.identity() == {"pid": os.getpid(), "run": "charlm"}
    assert reader.state() == "starting"
    written.set_state("running")
    assert reader.state() == "running"
    snapshot = reader.read()
    assert (snapshot.families, snapshot.modules, snapshot.heartbeats, reader.records()) == ([], {}, [], [])
    with pytest.raises(ValueError):
        written.set_state("asleep")


def test_the_identity_changes_key_by_key_and_often(written, reader):
    for step in range(2000):  # more than its region holds
        written.update_identity(step_offset=step, control="@hookd")
    assert reader.identity() == {"pid": os.getpid(), "run": "charlm", "step_offset": 1999, "control": "@hookd"}


def test_every_kind_of_family_is_read_back(written, reader):
    counter = written.family("hookd_calls", "counter", "Calls.", ("module",))
    gauge = written.family("hookd_loss", "gauge", "Loss.")
    seconds = written.family("hookd_step_seconds", "histogram", "Steps.", (), (0.1, 1.0))
    info = written.family("hookd_build", "info", "Build.", ("version",))
    written.cells[written.series(counter, ("fc",))] += 2
    written.cells[written.series(gauge)] = math.nan
    at = written.series(seconds)
    written.cells[at + 1] += 1  # the bucket of 1.0, not cumulative
    written.cells[at + 2] += 1  # that of +Inf
    written.cells[at + 3] += 2.5  # the sum
    written.series(info, ("1.0",))

    families = {family.name: family for family in reader.read().families}
    assert [s.cells for s in families["hookd_calls"].series] == [(2.0,)]
    assert math.isnan(families["hookd_loss"].series[0].cells[0])
    assert families["hookd_step_seconds"].series == [((), (0.0, 1.0, 1.0, 2.5))]
    assert families["hookd_step_seconds"].buckets == (0.1, 1.0)
    assert families["hookd_build"].series == [(("1.0",), (1.0,))]
    assert [f.kind for f in families.values()] == ["counter", "gauge", "histogram", "info"]
    assert (families["hookd_calls"].help, families["hookd_calls"].labels) == ("Calls.", ("module",))


def test_declaring_and_asking_again_gives_the_same(written):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    assert written.family("hookd_calls", "counter", "Said otherwise.", ("module",)) == family
    assert written.series(family, ("fc",)) == written.series(family, ("fc",)) != written.series(family, ("fc2",))


@pytest.mark.parametrize(
    "declaration",
    [
        ("hookd calls", "counter", ""),
        ("hookd_calls_total", "counter", ""),
        ("hookd_calls\n", "counter", ""),
        ("hookd_calls", "summary", ""),
        ("hookd_calls", "counter", "", ("a b",)),
        ("hookd_calls", "counter", "", ("__name__",)),
        ("hookd_calls", "counter", "", ("a", "a")),
        ("hookd_calls", "counter", "", (), (1.0,)),
        ("hookd_seconds", "histogram", ""),
        ("hookd_seconds", "histogram", "", ("le",), (1.0,)),
        ("hookd_seconds", "histogram", "", (), (1.0, 1.0)),
        ("hookd_seconds", "histogram", "", (), (1.0, math.inf)),
        ("hookd_seconds", "histogram", "", (), (math.nan,)),
    ],
)
def test_a_declaration_that_prometheus_would_refuse_is_refused(written, declaration):
    with pytest.raises(ValueError, match="hookd"):
        written.family(*declaration)


def test_a_conflicting_declaration_and_wrong_label_values_are_refused(written):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    with pytest.raises(ValueError, match="already declared"):
        written.family("hookd_calls", "gauge", "Calls.", ("module",))
    for values in [(), ("a", "b"), (1,)]:
        with pytest.raises(ValueError, match="not label values"):
            written.series(family, values)


def test_a_retired_series_is_gone_and_its_cell_is_reused_only_after_compact(written, reader):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    old = written.series(family, ("old",))
    written.cells[old] += 7
    written.retire(family, ("old",))
    assert cells_of(reader, "hookd_calls") == {}
    assert written.series(family, ("early",)) != old
    written.compact()
    assert written.series(family, ("late",)) == old
    assert cells_of(reader, "hookd_calls") == {("early",): (0.0,), ("late",): (0.0,)}


def test_a_retired_family_is_gone_and_its_name_can_be_declared_anew(written, reader):
    first = written.family("hookd_x", "counter", "X.", ("module",))
    written.series(first, ("a",))
    written.retire_family(first)
    assert reader.read().families == []
    second = written.family("hookd_x", "histogram", "X.", (), (1.0,))
    at = written.series(second)
    assert cells_of(reader, "hookd_x") == {(): (0.0, 0.0, 0.0)}
    written.compact()
    assert written.series(second) == at
    assert cells_of(reader, "hookd_x") == {(): (0.0, 0.0, 0.0)}
    assert written.series(first, ("a",)) not in range(at, at + 3), "a plugin that was unloaded gets the scratch cell"


def test_what_was_made_of_label_values_can_be_kept_by_key(written, reader):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    written.series(family, ("a",))
    (before,) = reader.read().families
    written.series(family, ("b",))
    (after,) = reader.read().families
    assert before.key == after.key
    assert before.values == (("a",),) == after.values[:1]
    assert len(before.series) == 1, "an older snapshot stays as it was"
    written.retire(family, ("a",))
    (last,) = reader.read().families
    assert last.key != after.key


def test_a_full_page_hands_out_scratch_cells_and_counts(written, reader):
    family = written.family("hookd_seconds", "histogram", "S.", ("module",), tuple(range(layout.MAX_BUCKETS)))
    indexes = {written.series(family, (f"m{n}",)) for n in range(2000)}
    refused = 2000 - (len(indexes) - 1)
    assert 0 < refused == written.dropped == reader.read().dropped
    assert len(cells_of(reader, "hookd_seconds")) == len(indexes) - 1
    for n in range(2000):
        at = written.series(family, (f"m{n}",))
        for cell in range(at, at + layout.MAX_BUCKETS + 2):
            written.cells[cell] += 1  # also of those who got scratch: nothing else may move
    assert written.dropped == refused, "asking again is not counted again"
    assert {cells for series in cells_of(reader, "hookd_seconds").values() for cells in series} == {1.0}
    for n in range(10):
        written.retire(family, (f"m{n}",))
    written.compact()
    assert written.series(family, ("m1999",)) in indexes
    assert written.dropped == refused


def test_a_full_schema_drops_series_and_makes_room_of_stale_ones(written, reader):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    names = [f"{n}".rjust(1000, "x") for n in range(1500)]
    for name in names:
        written.series(family, (name,))
    kept = cells_of(reader, "hookd_calls")
    assert 0 < len(kept) < 1500
    assert written.dropped == 1500 - len(kept)
    for name in names[:1000]:
        written.retire(family, (name,))
    written.series(family, ("now there is room",))
    assert ("now there is room",) in cells_of(reader, "hookd_calls")


def test_a_series_that_was_refused_is_made_once_there_is_room(written, reader, monkeypatch):
    monkeypatch.setattr(series, "MAX_SERIES", 1)
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    for name in ("a", "b", "b"):
        written.series(family, (name,))
    assert (list(cells_of(reader, "hookd_calls")), written.dropped) == ([("a",)], 1)
    written.retire(family, ("a",))
    written.compact()
    written.cells[written.series(family, ("b",))] += 2.0
    assert cells_of(reader, "hookd_calls") == {("b",): (2.0,)}


def test_endless_coming_and_going_never_fills_the_page(written, reader):
    lasting = written.series(written.family("hookd_steps", "counter", "Steps."))
    for n in range(300):
        family = written.family("hookd_calls", "counter", "Calls.", ("module",))
        for m in range(100):
            written.cells[written.series(family, (f"{n}.{m}".rjust(200, "x"),))] += 1
        written.retire_family(family)
        written.cells[lasting] += 1
        written.compact()
    assert written.dropped == 0
    assert cells_of(reader, "hookd_steps") == {(): (300.0,)}
    assert os.fstat(written.fd).st_blocks * 512 < 1 << 20, "the memory of the old halves is given back"


def test_without_compact_the_schema_is_rewritten_when_full(written, reader):
    family = written.family("hookd_calls", "counter", "Calls.", ("module",))
    for n in range(3000):
        written.series(family, (f"{n}".rjust(900, "x"),))
        written.retire(family, (f"{n}".rjust(900, "x"),))
    assert written.dropped == 0
    assert reader.read().generation > 0
    assert cells_of(reader, "hookd_calls") == {}


def test_modules_are_named_and_retired(written, reader):
    first = written.module("blocks.0", "Block", 1)
    second = written.module("#2.fc", "Linear", 2)
    assert reader.read().modules == {first: ("blocks.0", "Block", 1), second: ("#2.fc", "Linear", 2)}
    written.retire_module(first)
    assert list(reader.read().modules) == [second]
    written.compact()
    assert list(reader.read().modules) == [second]
    assert written.module("x", "X", 1) not in {0, first, second}


def test_a_number_that_a_copy_has_torn_is_read_again(written, reader, monkeypatch):
    numbers = [written.series(written.family("hookd_x", "gauge", "", ("n",)), (str(n),)) for n in range(3)]
    for at in numbers:
        written.cells[at] = 1.5
    offset, pread, torn = 8 * numbers[1], posix.pread, [0]

    def interrupted(fd, length, start):
        """Read like a kernel that is interrupted in the middle of a number; and that number keeps changing."""
        found = bytearray(pread(fd, length, start))
        if start <= offset < start + length:
            written.cells[numbers[1]] += 1.0
            torn[0] += 1
            if torn[0] <= 2:  # in both copies, differently in each
                found[offset - start : offset - start + torn[0]] = b"\xaa" * torn[0]
        return bytes(found)

    monkeypatch.setattr("hookd.wire.page.reader.posix.pread", interrupted)
    assert [found.cells for found in reader.read().families[0].series] == [(1.5,), (1.5 + torn[0] - 1,), (1.5,)]
    assert torn[0] == 2 + TRIES


def test_a_heartbeat_says_where_a_thread_is(written, reader):
    base = written.thread(4711, "MainThread")
    written.cells[base + page.MODULE] = 3
    written.cells[base + page.EVENTS] += 1
    written.cells[base + page.PHASE] = page.PHASES.index("backward")
    written.cells[base + page.STEP] = 21
    assert reader.heartbeats() == [(4711, "MainThread", 3, 1, "backward", 21)]
    written.release_thread(base)
    assert reader.heartbeats() == []
    again = written.thread(4712, "ü" * 100)
    assert again == base
    assert reader.heartbeats() == [(4712, "ü" * 32, 0, 0, "other", 0)]


def test_the_257th_thread_shares_the_last_heartbeat(written, reader):
    bases = [written.thread(n + 1, f"t{n}") for n in range(300)]
    assert len(set(bases)) == page.HEARTBEATS
    assert len(set(bases[255:])) == 1
    beats = reader.heartbeats()
    assert len(beats) == page.HEARTBEATS
    assert beats[-1].name == "(others)"
    written.release_thread(bases[255])
    written.release_thread(bases[0])
    assert written.thread(9, "t") == bases[0]
    assert written.thread(9, "t") == bases[255]


@pytest.fixture
def now(monkeypatch):
    """Stop a writer's clock at this time; return the time."""
    monkeypatch.setattr("hookd.wire.page.writer.clock", types.SimpleNamespace(time=lambda: 1234.5))
    return 1234.5


def test_the_recorder_keeps_the_newest_events(written, reader, now):
    ring = layout.divide(MIN_SIZE)["recorder"].length // layout.RECORD.size
    for n in range(ring + 10):
        written.record(1, 2, n, value=n / 2, when=1e9 + n)
    records = reader.records()
    assert [record.seq for record in records] == list(range(11, ring + 11))
    assert records[-1] == (ring + 10, 1e9 + ring + 9, 1, 2, ring + 9, (ring + 9) / 2)
    written.record(1, 2, 3, math.nan)
    last = reader.records()[-1]
    assert last.when == now
    assert math.isnan(last.value)


def test_the_full_page_has_the_room_that_is_promised():
    regions = layout.divide(page.SIZE)
    assert regions["recorder"].length == 65536 * layout.RECORD.size
    assert regions["values"].length > 8 * 2_000_000


@pytest.mark.parametrize("size", [page.SIZE >> n for n in range(5)])
def test_regions_are_aligned_adjacent_and_fill_the_page(size):
    regions = layout.divide(size)
    end = layout.HEADER_BYTES
    for name, region in regions.items():
        assert region.offset == end
        assert region.offset % 4096 == region.length % 4096 == 0
        assert name not in layout.HEAD_WORDS or region.length // 2 % 4096 == 0, "halves are given back as whole pages"
        end += region.length
    assert end == size
    assert regions["logs"].length // 2 > layout.MAX_RECORD


def test_incidents_and_logs_are_numbered_and_dated(written, reader, now):
    assert written.incident({"kind": "nan", "message": "born in fc", "step": 21, "module": "fc"}) == 1
    assert written.incident({"kind": "hang", "time": 5, "seq": 99}) == 2
    written.log("error", "nan: 3 errors")
    first, second = reader.read().incidents
    assert first == {"seq": 1, "time": now, "kind": "nan", "message": "born in fc", "step": 21, "module": "fc"}
    assert second == {"seq": 2, "kind": "hang", "time": 5.0}
    (line,) = reader.read().logs
    assert (line["level"], line["message"]) == ("error", "nan: 3 errors")


def test_of_too_many_incidents_the_newest_are_kept(written, reader):
    for n in range(5000):
        assert written.incident({"kind": "nan", "message": f"{n}"}) == n + 1
    kept = [incident["seq"] for incident in reader.read().incidents]
    assert kept == list(range(kept[0], 5001))
    assert len(kept) > 100


def test_an_incident_of_any_length_fits_into_a_record():
    for length in range(layout.MAX_RECORD - 200, layout.MAX_RECORD):
        rows = ["x" * 1000] * (length // 1003)
        assert len(log.frame(log.object_of({"rows": [*rows, "x" * (length % 1003)]}))) <= layout.MAX_RECORD


class Opaque:
    def __repr__(self) -> str:
        raise AssertionError("the text of a tensor would launch a sync")


def test_an_incident_may_hold_anything(written, reader):
    endless: list[object] = []
    endless.append(endless)
    written.incident(
        {
            "tensor": Opaque(),
            "norm": math.nan,
            "peak": -math.inf,
            "huge": 10**5000,
            "path": "\udcff",
            "endless": endless,
            "time": "yesterday",
            "frozen": types.MappingProxyType({"a": 1}),
            ("no", "key"): 1,
            3: {"deep": [1, 2.5, None, True, ("a",)]},
        }
    )
    written.incident({"message": "\0" * 100_000, "list": ["x" * 5000] * 64, "kind": "long"})
    first, second = reader.read().incidents
    assert first["tensor"] == "(Opaque)"
    assert (first["norm"], first["peak"], first["huge"]) == ("nan", "-inf", "(huge integer)")
    assert first["path"] == "?"
    assert first["frozen"] == {"a": 1}
    assert first["3"] == {"deep": [1, 2.5, None, True, ["a"]]}
    assert isinstance(first["time"], float)
    assert second["kind"] == "long"
    assert second["message"].startswith("\0" * 40)


def test_an_untouched_page_takes_no_memory():
    made = PageWriter.create({"pid": 1})
    reader = read_end(made)
    assert os.fstat(made.fd).st_size == page.SIZE
    reader.read()
    reader.records()
    assert os.fstat(made.fd).st_blocks * 512 <= 64 << 10
    for n in range(100):
        made.cells[made.series(made.family("hookd_x", "gauge", "X.", ("n",)), (str(n),))] = n
    assert os.fstat(made.fd).st_blocks * 512 <= 128 << 10
    reader.close()
    made.close()


def test_closing_releases_everything():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("hookd-page")

    before = descriptors(), maps()
    for _ in range(50):
        made = PageWriter.create({"pid": 1})
        reader = read_end(made)
        made.cells[made.series(made.family("hookd_x", "gauge", "X."))] = 1
        reader.read()
        reader.close()
        reader.close()
        made.close()
        made.close()
        made.abandon()
        assert (made.fd, reader.fd) == (-1, -1)
    assert (descriptors(), maps()) == before


def test_a_closed_page_takes_calls_and_refuses_stores(written):
    family = written.family("hookd_x", "gauge", "X.", ("n",))
    at = written.series(family, ("1",))
    base = written.thread(1, "t")
    written.close()
    with pytest.raises(ValueError, match="released"):
        written.cells[at] = 1.0
    with pytest.raises(ValueError, match="released"):
        written.record(1, 2, 3)
    written.series(family, ("2",))
    written.family("hookd_y", "gauge", "Y.")
    written.retire(family, ("1",))
    written.retire_family(family)
    written.compact()
    written.module("a", "A", 1)
    written.thread(2, "t")
    written.release_thread(base)
    written.set_state("exited")
    written.update_identity(a=1)
    written.log("info", "gone")
    assert written.incident({"kind": "nan"}) == 0


def test_a_reader_outlives_the_writer(written, reader):
    written.cells[written.series(written.family("hookd_x", "gauge", "X."))] = 5
    written.incident({"kind": "exit"})
    written.set_state("exited")
    written.close()
    snapshot = reader.read()
    assert snapshot.state == "exited"
    assert snapshot.families[0].series == [((), (5.0,))]
    assert snapshot.incidents[0]["kind"] == "exit"


def test_a_page_of_a_wrong_size_is_not_created():
    for size in (0, MIN_SIZE // 2, MIN_SIZE + 1, 3 * MIN_SIZE, page.SIZE * 2):
        with pytest.raises(ValueError, match="power of two"):
            PageWriter.create({}, size=size)


def test_a_lost_lock_costs_series_and_never_a_hang(written, monkeypatch):
    import threading

    waits = []

    class Lock:
        """A lock that another thread holds; it records for how long it is waited for."""

        def acquire(self, timeout):
            waits.append(timeout)
            return lock.acquire(timeout=min(timeout, 0.05))

        def release(self):
            lock.release()

    family, lock = written.family("hookd_x", "gauge", "X.", ("n",)), written._lock
    monkeypatch.setattr(written, "_lock", Lock())
    thread = threading.Thread(target=lock.acquire)  # and it is never released
    thread.start()
    thread.join()
    indexes = {written.series(family, (str(n),)) for n in range(100)}
    assert waits == [series.LOCK_WAIT_S] + [0] * 99, "only once"
    assert indexes == {written._scratch}
    assert written.dropped == 100
    written.close()


# What the state machine below writes.
texts = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["", "fc", 'a"\\\n', "\ud800", "(root)"]
)
floats = st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf, 5e-324])
names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,5}", fullmatch=True).filter(lambda name: not name.endswith("_total"))
label_names = st.lists(
    st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,3}", fullmatch=True).filter(lambda name: name != "le"),
    max_size=3,
    unique=True,
)
bucket_lists = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4, unique=True).map(
    lambda bounds: sorted(0.0 if bound == 0 else bound for bound in bounds)
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def printable(value):
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def bits(values) -> bytes:
    """NaN equals itself, -0.0 does not equal 0.0."""
    return struct.pack(f"{len(values)}d", *values)


class PageMachine(RuleBasedStateMachine):
    """One writer, one reader that reads all the time, one that comes late; a model of dicts."""

    families = Bundle("families")
    series = Bundle("series")

    def __init__(self) -> None:
        super().__init__()
        self.writer = PageWriter.create({"pid": 1}, size=MIN_SIZE)
        self.reader = read_end(self.writer)
        self.identity: dict[str, object] = {"pid": 1}
        self.declared: dict[int, tuple] = {}
        self.values: dict[int, dict[tuple[str, ...], list[float]]] = {}
        self.modules: dict[int, tuple] = {}
        self.incidents: list[dict] = []
        self.threads: dict[int, tuple] = {}

    def teardown(self) -> None:
        self.reader.close()
        self.writer.close()

    @rule(
        target=families,
        name=names,
        kind=st.sampled_from(page.KINDS),
        text=texts,
        labels=label_names,
        buckets=bucket_lists,
    )
    def declare(self, name, kind, text, labels, buckets):
        bounds = tuple(buckets) if kind == "histogram" else ()
        declaration = (name, kind, printable(text), tuple(labels), bounds)
        known = next((d for d in self.declared.values() if d[0] == name), None)
        if known and (known[1], known[3], known[4]) != (kind, tuple(labels), bounds):
            with pytest.raises(ValueError, match="already declared"):
                self.writer.family(name, kind, text, labels, bounds)
            return next(number for number, d in self.declared.items() if d[0] == name)
        family = self.writer.family(name, kind, text, labels, bounds)
        if known:
            assert self.declared[family] == known
        else:
            assert family not in self.declared
            self.declared[family] = declaration
            self.values[family] = {}
        return family

    @rule(target=series, family=families, data=st.data())
    def add(self, family, data):
        if family not in self.declared:
            return family, ()
        values = tuple(data.draw(texts) for _ in self.declared[family][3])
        at = self.writer.series(family, values)
        key = printable(list(values))
        cells = self.values[family].setdefault(tuple(key), [])
        if not cells:
            buckets = self.declared[family][4]
            cells += [1.0 if self.declared[family][1] == "info" else 0.0] * (len(buckets) + 2 if buckets else 1)
        assert bits(self.writer.cells[at : at + len(cells)].tolist()) == bits(cells)
        return family, values

    @rule(series=series, value=floats, which=st.integers(0, 5))
    def store(self, series, value, which):
        family, values = series
        cells = self.values.get(family, {}).get(tuple(printable(list(values))))
        if cells:
            which %= len(cells)
            self.writer.cells[self.writer.series(family, values) + which] = value
            cells[which] = value

    @rule(series=consumes(series))
    def retire(self, series):
        family, values = series
        self.writer.retire(family, values)
        self.values.get(family, {}).pop(tuple(printable(list(values))), None)

    @rule(family=consumes(families))
    def retire_family(self, family):
        self.writer.retire_family(family)
        self.declared.pop(family, None)
        self.values.pop(family, None)

    @rule()
    def compact(self):
        self.writer.compact()

    @rule(name=texts, kind=texts, root=st.integers(1, 5))
    def add_module(self, name, kind, root):
        self.modules[self.writer.module(name, kind, root)] = (printable(name), printable(kind), root)

    @precondition(lambda self: self.modules)
    @rule(data=st.data())
    def retire_module(self, data):
        module = data.draw(st.sampled_from(list(self.modules)))
        self.writer.retire_module(module)
        del self.modules[module]

    @rule(fields=st.dictionaries(st.text(max_size=8), json_values, max_size=4))
    def tell(self, fields):
        self.writer.incident(fields)
        self.incidents.append({k: printable(v) for k, v in fields.items() if k not in ("seq", "time")})

    @rule(fields=st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), json_values, max_size=3))
    def change_identity(self, fields):
        self.writer.update_identity(**fields)
        self.identity.update(printable(fields))

    @rule(tid=st.integers(1, 2**31), module=st.integers(0, 9))
    def beat(self, tid, module):
        base = self.writer.thread(tid, "t")
        self.writer.cells[base + page.MODULE] = module
        self.threads[base] = (tid, "t", module, 0, "other", 0)

    @precondition(lambda self: self.threads)
    @rule(data=st.data())
    def release_thread(self, data):
        base = data.draw(st.sampled_from(list(self.threads)))
        self.writer.release_thread(base)
        del self.threads[base]

    @rule(value=floats)
    def record(self, value):
        self.writer.record(1, 2, 3, value, when=4.0)
        last = self.reader.records()[-1]
        assert (last[1:5], bits([last.value])) == ((4.0, 1, 2, 3), bits([value]))

    @rule()
    def a_late_reader_sees_the_same(self):
        late = read_end(self.writer)
        self.check(late)
        late.close()

    @invariant()
    def what_was_written_is_read_back(self):
        self.check(self.reader)

    def check(self, reader: PageReader) -> None:
        snapshot = reader.read()
        seen = {
            (f.name, f.kind, f.help, f.labels, f.buckets): {s.values: bits(s.cells) for s in f.series}
            for f in snapshot.families
        }
        assert seen == {
            declaration: {values: bits(cells) for values, cells in self.values[family].items()}
            for family, declaration in self.declared.items()
        }
        assert len(snapshot.families) == len(self.declared)
        assert snapshot.modules == self.modules
        assert sorted(snapshot.heartbeats) == sorted(self.threads.values())
        assert snapshot.identity == reader.identity() == self.identity
        reported = [{k: v for k, v in incident.items() if k not in ("seq", "time")} for incident in snapshot.incidents]
        assert reported == self.incidents
        assert snapshot.dropped == 0


PageMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_whatever_was_written_is_read_back = PageMachine.TestCase
