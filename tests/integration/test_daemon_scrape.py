"""The cost of a scrape for those who have nothing to do with it: the target, the daemon, and the other readers."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.daemon import tell
from tests.support.processes import PATIENCE_S, wait_until


@pytest.fixture
def detailed(serve, hold, run, tmp_path):
    """A daemon that serves every series, and a target whose page is larger than a socket's buffers."""
    holder = hold()
    tell(holder, modules={"count": 40_000})
    config = tmp_path / "hookd.toml"
    config.write_text('[metrics]\ndetail = "all"\n')
    daemon = serve("--config", config)
    wait_until(lambda: daemon.metrics().select("hookd_activations_mean", run=run), what="the page")
    return daemon, holder


def activity(pid: int) -> dict[str, tuple[int, ...]]:
    """Return the context switches and page faults of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines() if ":\t" in line)
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        switches = (int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"]))
        found[task.name] = (*switches, int(fields[7]), int(fields[9]))  # minflt, majflt
    return found


def test_a_scrape_causes_no_wake_up_and_no_fault_in_the_target(serve, hold, run):
    holder = hold()
    tell(holder, modules={"count": 1000})
    daemon = serve()
    wait_until(lambda: daemon.metrics().select("hookd_activations_mean", run=run), what="the page")
    before = activity(holder.pid)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0") * 25:
        assert f'run="{run}"' in daemon.get("/metrics", Accept=accept)
    assert activity(holder.pid) == before
    tell(holder, event={})
    assert activity(holder.pid) != before, "a wake-up would have been seen"


def test_readers_that_never_read_hold_neither_memory_nor_others_up(detailed):
    daemon, _ = detailed
    process = psutil.Process(daemon.process.pid)
    for _ in range(3):
        size = len(daemon.get("/metrics"))
    assert size > 5e6
    resident, threads = process.memory_info().rss, process.num_threads()
    with contextlib.ExitStack() as stuck:
        for _ in range(20):
            stuck.enter_context(contextlib.closing(asking(daemon.url)))
            assert len(daemon.get("/metrics")) > 5e6, "the next reader is served all the same"
        grown = process.memory_info().rss - resident
        assert grown < 12 * size, f"{grown / 2**20:.0f} MiB for pages of {size / 2**20:.0f} MiB"
        assert process.num_threads() <= threads + 8
        wait_until(lambda: not connections(process), what="an end of the stuck readers")


def asking(url: str) -> socket.socket:
    """Ask for the metrics, and never read the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return reader


def connections(process: psutil.Process) -> list[object]:
    return [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]


def test_fifty_scrapers_at_once_are_all_answered_and_bounded(detailed):
    daemon, _ = detailed
    process = psutil.Process(daemon.process.pid)
    size = len(daemon.get("/metrics"))
    threads, answers = process.num_threads(), []
    host = daemon.url.removeprefix("http://")

    def scrape():
        connection = http.client.HTTPConnection(host, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError, http.client.HTTPException):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            answers.append((answer.status, len(answer.read())))

    scrapers = [threading.Thread(target=scrape) for _ in range(50)]
    for one in scrapers:
        one.start()
    for one in scrapers:
        one.join()
    assert {status for status, _ in answers} <= {200, 503}, answers
    assert [length for status, length in answers if status == 200 and length > 0.9 * size], "some are served in full"
    assert process.num_threads() <= threads + 8
    assert len(daemon.get("/metrics")) > 0.9 * size


def test_the_daemon_does_not_grow_with_the_scrapes(serve, hold, run):
    holder = hold()
    tell(holder, modules={"count": 400})
    daemon = serve()
    wait_until(lambda: daemon.metrics().select("hookd_activations_mean", run=run), what="the page")
    process, host = psutil.Process(daemon.process.pid), daemon.url.removeprefix("http://")
    resident = []
    with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        for n in range(600):
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            if n in (99, 599):
                resident.append(process.memory_info().rss)
    assert resident[1] - resident[0] < 4 << 20, resident
    assert len(os.listdir(f"/proc/{process.pid}/fd")) < 100
