"""The page between threads and processes: torn floats, lost increments, signals, forks, kills, limits."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hookd
from hookd.errors import PageError
from hookd.tool.attach import discover
from hookd.wire.page import MIN_SIZE, PageReader, PageWriter
from tests.support import emulated

ROOT = str(Path(hookd.__file__).parents[1])
START = """
import os, sys
from hookd.errors import PageError
from hookd.wire.page import *
"""
ALTERNATING = [struct.unpack("=d", struct.pack("=Q", bits))[0] for bits in (0x5555555555555555, 0xAAAAAAAAAAAAAAAA)]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python on a text, with the names of the page imported; it is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", START + code, *arguments],
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def output(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return out


def open_page(process: subprocess.Popen[str]) -> PageReader:
    """Open the page of a process that prints its descriptor, as the daemon does."""
    assert process.stdout is not None
    path = Path(f"/proc/{process.pid}/fd/{int(process.stdout.readline())}")
    assert str(path.readlink()) == "/memfd:hookd-page (deleted)"
    return PageReader(os.open(path, os.O_RDONLY))


def test_no_float_is_torn_in_a_million_updates_of_another_process(start):
    process = start(
        """
import struct
one, two = (struct.unpack("=d", struct.pack("=Q", bits))[0] for bits in (0x5555555555555555, 0xAAAAAAAAAAAAAAAA))
page = PageWriter.create({"pid": os.getpid()})
updates = page.series(page.family("hookd_updates", "counter", ""))
family = page.family("hookd_x", "gauge", "", ("n",))
indexes = [page.series(family, (str(n),)) for n in range(64)]
cells = page.cells
print(page.fd, flush=True)
while True:
    for i in indexes:
        cells[i] = one
    for i in indexes:
        cells[i] = two
    cells[updates] += 128
"""
    )
    reader = open_page(process)
    reads, seen = 0, set()
    while True:
        counted, written = reader.read().families
        values = {value for series in written.series for value in series.cells}
        assert values <= {*ALTERNATING, 0.0}
        seen |= values
        reads += 1
        if counted.series[0].cells[0] >= 1_000_000 and reads >= 1000 and seen >= set(ALTERNATING):
            break
    reader.close()


def test_threads_lose_no_increment_and_the_reader_sees_them_all():
    page = PageWriter.create({"pid": 1}, size=MIN_SIZE)
    family = page.family("hookd_x", "counter", "", ("n",))
    index = page.series(family, ("shared",))
    cells = page.cells
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def count() -> None:
        for _ in range(50_000):
            cells[index] += 1.0

    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert cells[index] == 200_000
    page.close()


def test_threads_that_register_at_once_get_their_own_cells_and_the_same_for_the_same():
    page = PageWriter.create({"pid": 1}, size=MIN_SIZE)
    found: list[dict[str, int]] = [{} for _ in range(4)]
    barrier = threading.Barrier(4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def register(mine: dict[str, int]) -> None:
        barrier.wait()
        for n in range(500):
            family = page.family("hookd_x", "counter", "", ("n",))
            mine[str(n)] = page.series(family, (str(n),))
            page.incident({"n": n})
            page.record(1, 2, 3)
            page.module(str(n), "M", 1)

    try:
        threads = [threading.Thread(target=register, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0].values())) == 500
    reader = PageReader(os.dup(page.fd))
    snapshot = reader.read()
    assert len(snapshot.families[0].series) == 500
    assert [incident["seq"] for incident in snapshot.incidents][-1] == 2000
    assert len(snapshot.modules) == 2000
    assert [record.seq for record in reader.records()] == list(range(1, 2001))
    reader.close()
    page.close()


def test_a_reader_never_sees_a_cell_under_the_name_of_another_series(start):
    """Series come, go and are compacted all the time; each holds the number that is its name, or 0 at first."""
    process = start(
        """
page = PageWriter.create({"pid": os.getpid()}, size=MIN_SIZE)
print(page.fd, flush=True)
n = 0
while True:
    family = page.family("hookd_x", "gauge", "", ("n",))
    for _ in range(300):
        n += 1
        page.cells[page.series(family, (str(n),))] = n
        if n > 20:
            page.retire(family, (str(n - 20),))
    page.incident({"kind": "x", "n": n, "again": n})
    page.update_identity(n=n, again=n)
    page.compact()
    if n % 1200 == 0:
        page.retire_family(family)
        page.compact()
"""
    )
    reader = open_page(process)
    generations, seen = set(), set()
    while len(generations) < 100 or len(seen) < 300:
        snapshot = reader.read()
        generations.add(snapshot.generation)
        for family in snapshot.families:
            for series in family.series:
                assert series.cells[0] in (0.0, float(series.values[0]))
                seen.add(series.values[0])
        assert snapshot.identity.get("n") == snapshot.identity.get("again")
        numbers = [incident["seq"] for incident in snapshot.incidents]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    reader.close()


def test_a_page_is_read_after_its_writer_was_killed(start):
    process = start(
        """
page = PageWriter.create({"pid": os.getpid()})
index = page.series(page.family("hookd_x", "counter", ""))
base = page.thread(os.getpid(), "MainThread")
page.set_state("running")
print(page.fd, flush=True)
while True:
    page.cells[index] += 1
    page.cells[base + STEP] += 1
    page.record(1, 2, 3)
    page.family("hookd_y", "gauge", "")
    page.retire_family(page.family("hookd_y", "gauge", ""))
    page.compact()
    print("rewritten", flush=True)
"""
    )
    reader = open_page(process)
    for _ in range(100):  # not read meanwhile: it is rewritten faster than that
        assert process.stdout.readline() == "rewritten\n"
    process.kill()
    process.wait(timeout=60)
    first, records = reader.read(), reader.records()
    assert (first, records) == (reader.read(), reader.records())
    assert first.state == "running"
    assert first.heartbeats[0].step > 0
    assert records[-1].seq == len(records) or len(records) == 65536
    fresh = PageReader(os.open(f"/proc/self/fd/{reader.fd}", os.O_RDONLY))
    assert (fresh.read(), fresh.records()) == (first, records), (
        "a daemon that starts now and is handed the descriptor sees the same"
    )
    fresh.close()
    reader.close()


def test_a_forked_child_lets_go_without_the_lock_and_the_parent_goes_on(start):
    process = start(
        """
import threading
page = PageWriter.create({"pid": os.getpid()})
index = page.series(page.family("hookd_x", "counter", ""))
held, release = threading.Event(), threading.Event()
def hold():
    with page._lock:
        held.set()
        release.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if not child:
    page.abandon()
    page.abandon()
    left = [line for line in open("/proc/self/maps") if "hookd-page" in line]
    left += [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}") and "hookd-page" in os.readlink(f"/proc/self/fd/{fd}")]
    os._exit(len(left))
_, status = os.waitpid(child, 0)
release.set()
holder.join()
page.cells[index] += 1
page.series(page.family("hookd_y", "counter", ""))
reader = PageReader(os.dup(page.fd))
print(status, [family.series for family in reader.read().families])
page.close()
"""
    )
    assert output(process) == "0 [[Series(values=(), cells=(1.0,))], [Series(values=(), cells=(0.0,))]]\n"


def test_signal_handlers_that_register_too_neither_hang_nor_spoil_the_page(start):
    process = start(
        """
import itertools, signal
page = PageWriter.create({"pid": os.getpid()})
calls = itertools.count()
def handler(signum, frame):
    n = next(calls)
    family = page.family("hookd_signals", "gauge", "", ("n",))
    page.cells[page.series(family, (str(n),))] = n
    page.incident({"kind": "signal", "n": n})
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
family = page.family("hookd_x", "gauge", "", ("n",))
for n in range(30_000):
    page.cells[page.series(family, (str(n),))] = n
    if n % 10_000 == 9_999:
        page.retire(family, (str(n),))
        page.compact()
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one that is still on its way would end the process once Python has restored its handler
snapshot = PageReader(os.dup(page.fd)).read()
found = {family.name: {float(s.values[0]): s.cells[0] for s in family.series} for family in snapshot.families}
assert found["hookd_x"] == {float(n): n for n in range(30_000) if n % 10_000 != 9_999}
assert all(key == value for key, value in found["hookd_signals"].items())
assert len(found["hookd_signals"]) + page.dropped == next(calls) > 20, (len(found["hookd_signals"]), page.dropped)
"""
    )
    output(process)


def test_signal_handlers_that_raise_in_the_middle_spoil_nothing(start):
    process = start(
        """
import signal, threading
page = PageWriter.create({"pid": os.getpid()})
class Stop(Exception): pass
def handler(signum, frame):
    raise Stop
signal.signal(signal.SIGALRM, handler)
reader = PageReader(os.dup(page.fd))
n = 0
def churn():
    global n
    signal.setitimer(signal.ITIMER_REAL, 1e-4 + n % 7 * 1e-5)
    while True:
        n += 1
        family = page.family("hookd_x", "gauge", "", ("n",))
        index = page.series(family, (str(n % 300),))
        if index != page._scratch:
            page.cells[index] = n % 300
        page.incident({"n": n})
        page.update_identity(n=n)
        page.retire(family, (str((n + 150) % 300),))
        if n % 50 == 0:
            page.compact()
        if n % 1000 == 0:
            page.retire_family(family)
for _ in range(100):
    try:
        churn()
    except Stop:
        pass
    for family in reader.read().families:
        for series in family.series:
            assert series.cells[0] in (0.0, float(series.values[0])), series
signal.setitimer(signal.ITIMER_REAL, 0)
page.compact()
def last():
    page.cells[page.series(page.family("hookd_last", "gauge", ""))] = 42
thread = threading.Thread(target=last)
thread.start()
thread.join()
assert not page._is_lock_lost
assert {family.name: family for family in reader.read().families}["hookd_last"].series[0].cells == (42.0,)
"""
    )
    output(process)


LIMITED = """
import pathlib, resource, signal, time
limit, room = sys.argv[1], int(sys.argv[2])
if limit == "RLIMIT_AS":
    room += int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * 4096
before = len(os.listdir("/proc/self/fd"))  # libffi 3.5 has one of its own
resource.setrlimit(getattr(resource, limit), (room, room))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which kills; Python ignores it, a training script may not
try:
    page = PageWriter.create({"pid": os.getpid()})
except PageError as exc:
    print(exc.reason, len(os.listdir("/proc/self/fd")) - before, exc.hint)
else:
    page.cells[page.series(page.family("hookd_x", "gauge", ""))] = 5
    reader = PageReader(os.dup(page.fd))
    print(os.fstat(page.fd).st_size >> 20, reader.read().families[0].series[0].cells[0])
"""


@pytest.mark.parametrize(
    ("limit", "room", "printed"),
    [
        ("RLIMIT_FSIZE", 64 << 20, "64 5.0"),
        ("RLIMIT_FSIZE", 40 << 20, "32 5.0"),
        ("RLIMIT_FSIZE", 4 << 20, "4 5.0"),
        ("RLIMIT_AS", 1 << 30, "64 5.0"),
        pytest.param("RLIMIT_AS", 50 << 20, "8 5.0", marks=emulated.lacks("limit")),
        pytest.param("RLIMIT_AS", 17 << 20, "4 5.0", marks=emulated.lacks("limit")),
    ],
)
def test_a_process_of_little_room_gets_a_smaller_page(start, limit, room, printed):
    assert output(start(LIMITED, limit, str(room))).strip() == printed


@pytest.mark.parametrize(
    ("limit", "room", "reason"),
    [
        ("RLIMIT_FSIZE", 1 << 20, "no-memory"),
        ("RLIMIT_FSIZE", 0, "no-memory"),
        pytest.param("RLIMIT_AS", 10 << 20, "no-memory", marks=emulated.lacks("limit")),
        ("RLIMIT_NOFILE", 3, "no-memfd"),
    ],
)
def test_a_process_of_no_room_says_so_and_lives(start, limit, room, reason):
    code = LIMITED if limit != "RLIMIT_NOFILE" else LIMITED.replace('len(os.listdir("/proc/self/fd")) - before', "0")
    said, descriptors, hint = output(start(code, limit, str(room))).strip().split(maxsplit=2)
    assert (said, descriptors) == (reason, "0"), "nothing is left open"
    assert "prlimit" in hint


@emulated.lacks("limit")
def test_a_map_that_the_kernel_refuses_is_tried_smaller(monkeypatch):
    from hookd.wire.page import memory

    monkeypatch.setattr(memory, "_mapped_bytes", lambda: -(1 << 40))  # as if nothing were scarce
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    before = descriptors()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), limits[1]))
    try:
        page = PageWriter.create({"pid": 1})
        size = os.fstat(page.fd).st_size
        page.close()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), limits[1]))
        with pytest.raises(PageError) as refused:
            PageWriter.create({"pid": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert size < 64 << 20
    assert refused.value.reason == "no-memory"
    assert descriptors() == before


@pytest.mark.parametrize("closed", [(0,), (1, 2), (0, 1, 2)])
def test_a_page_never_becomes_a_standard_stream(start, tmp_path, closed):
    process = start(
        """
import ast
for fd in ast.literal_eval(sys.argv[1]):
    os.close(fd)
page = PageWriter.create({"pid": os.getpid()})
links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}
open(sys.argv[2], "w").write(repr([fd for fd, link in links.items() if "hookd-page" in link]))
os._exit(0)
""",
        repr(closed),
        str(tmp_path / "links"),
    )
    process.wait(timeout=60)
    descriptors = (tmp_path / "links").read_text().strip("[]").split(", ")
    assert len(descriptors) == 1, "the map has none"
    assert int(descriptors[0]) >= 3


def test_a_python_whose_libc_was_old_makes_the_page_too(start):
    process = start(
        """
import posix
del posix.memfd_create
page = PageWriter.create({"pid": 1})
print(os.readlink(f"/proc/self/fd/{page.fd}"), os.get_inheritable(page.fd), PageReader(os.dup(page.fd)).state())
"""
    )
    assert output(process) == "/memfd:hookd-page (deleted) False starting\n"


def test_a_page_is_closed_by_exec_and_cannot_be_executed(start):
    process = start(
        """
page = PageWriter.create({"pid": 1})
assert not os.fstat(page.fd).st_mode & 0o111
os.execv(sys.executable, [sys.executable, "-c", "import os; print([l for f in os.listdir('/proc/self/fd') if os.path.lexists(p := f'/proc/self/fd/{f}') and 'hookd' in (l := os.readlink(p))])"])
"""
    )
    assert output(process) == "[]\n"


def test_importing_and_creating_starts_nothing(start):
    process = start(
        """
import signal, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
page = PageWriter.create({"pid": 1})
PageReader(os.dup(page.fd)).read()
page.close()
print(threading.active_count(), before == {number: signal.getsignal(number) for number in signal.valid_signals()})
"""
    )
    assert output(process) == "1 True\n"


def test_a_pipe_under_the_pages_name_is_not_waited_for(tmp_path, monkeypatch):
    """A container can have files of any name in its root directory, and the kernel shows them by that name."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    read = discover.proc.read
    monkeypatch.setattr(discover.proc, "read", lambda *a: b"/memfd:hookd-page" if a[1] == "maps" else read(*a))
    monkeypatch.setattr(discover.proc, "link", lambda _, name: "/memfd:hookd-page" * (name == f"fd/{pipe}"))
    try:
        assert discover.find_page(os.getpid()) is None
    finally:
        os.close(pipe)


def test_a_page_of_another_process_is_let_go_of(start):
    """As from a forked child, which holds the page of its parent."""
    process = start("""
page = PageWriter.create({"pid": 1, "start_ticks": 1})
print("made", flush=True)
input()
""")
    assert process.stdout.readline() == "made\n"
    assert discover.find_page(process.pid) is None
    before = descriptors()
    assert discover.find_page(process.pid) is None
    assert descriptors() == before
