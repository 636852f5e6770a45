"""A daemon that is killed, or out of descriptors or disk: it serves its targets again, and reports its problems."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

import psutil
import pytest

from hookd.tool.daemon.incidents.kinds import FROM_ZERO
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.linux import proc
from hookd.tool.linux.owner import user_name
from tests.support.daemon import tell
from tests.support.environment import tool_environment
from tests.support.herd import Herd
from tests.support.processes import wait_until
from tests.support.tool import Page

OF_THE_DAEMON = {"hookd_attach_total", "hookd_attach_pause_seconds", "process_"}
"""Counters of the daemon's own work and process: they begin again with it, as those of any process."""


@pytest.fixture
def herd(stack):
    herd = Herd()
    stack.callback(herd.close)
    return herd


@pytest.fixture
def run(run, monkeypatch):
    """The test's own run; what else trains on this machine is not looked at."""
    monkeypatch.setitem(OWN, "run", run)
    return run


OWN = {"run": ""}


def served(daemon):
    rows = daemon.client.targets()
    return {row["pid"] for row in rows if row["state"] == "attached" and row["run"].startswith(OWN["run"])}


def counters(daemon):
    """Return everything of the test's targets that may only grow, by name and labels."""
    ends = ("_total", "_count", "_sum", "_bucket")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for sample in daemon.metrics().samples
        if sample.name.endswith(ends)
        and not sample.name.startswith(tuple(OF_THE_DAEMON))
        and sample.labels.get("run", OWN["run"]).startswith(OWN["run"])
    }


def test_a_daemon_that_is_killed_comes_back_with_the_same_series_and_no_counter_falls(serve, herd, hold, run, tmp_path):
    holder = hold()
    tell(holder, put={"name": "hookd_x_seconds", "kind": "histogram", "value": [1, 2, 3, 0.25], "buckets": [0.1, 1]})
    tell(holder, put={"name": "hookd_incidents", "kind": "counter", "value": 2, "labels": {"kind": "nan"}})
    pids = herd.start(12, run)
    store = IncidentStore.open(tmp_path / "state")
    with contextlib.closing(Page.of(holder.pid)) as page:
        key = (holder.pid, proc.start_ticks(holder.pid), os.fstat(page.reader.fd).st_ino)
    store.add_own(key, run, "0", {"kind": "found", "message": "reported by an earlier daemon"})
    store.close()
    daemon = serve()
    wait_until(lambda: served(daemon) >= {holder.pid, *pids}, what="discovery")
    before = counters(daemon)
    assert {key[0] for key in before} >= {
        "hookd_x_seconds_bucket", "hookd_x_seconds_sum", "hookd_x_seconds_count", "hookd_steps_total",
        "hookd_step_seconds_bucket", "hookd_incidents_total", "hookd_series_dropped_total", "hookd_target_cpu_seconds_total",
    }  # fmt: skip
    assert daemon.metrics().labels("hookd_incidents_total", "kind", run=run) == {*FROM_ZERO, "found"}
    daemon.process.signal(signal.SIGKILL)
    daemon.process.wait()
    after = counters(serve())  # which is its first answer
    assert after.keys() == before.keys()
    assert {key: value for key, value in before.items() if after[key] < value} == {}


def test_who_died_while_no_daemon_ran_is_reported_by_the_next_one_once(serve, herd, hold, run):
    alive, leaving, dying = herd.start(3, run)
    holder = hold()
    tell(holder, put={"name": "hookd_steps", "kind": "counter", "value": 345})
    daemon = serve()
    wait_until(lambda: served(daemon) >= {alive, leaving, dying, holder.pid}, what="discovery")
    herd.end([leaving], "exit")
    wait_until(lambda: leaving not in served(daemon), what="the end that it sees itself")
    mine = {alive, dying, leaving, holder.pid}  # others may train on this machine as well
    wait_until(lambda: noted(daemon) & mine == {alive, dying, holder.pid}, what="who is alive is noted")
    daemon.process.signal(signal.SIGKILL)
    daemon.process.wait()
    herd.end([dying], "kill")
    holder.signal(signal.SIGKILL)
    holder.wait()
    again = serve()
    again.process.expect(
        rf"lost in process {holder.pid} of user {user_name(os.getuid())} \(run {run}, rank 0\) at step 345 "
        rf"\(counted from the attach\): process {holder.pid} was gone "
        r"when the daemon came back: last seen alive at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, how it ended is unknown$"
    )
    wait_until(lambda: noted(again) & mine == {alive}, what="the next note")
    assert lost(again, mine) == sorted([(dying, "unknown"), (holder.pid, "unknown")])
    again.process.signal(signal.SIGTERM)
    again.process.wait()
    third = serve()
    wait_until(lambda: served(third) & mine == {alive}, what="discovery")
    assert len(lost(third, mine)) == 2


def lost(daemon, pids):
    rows = daemon.client.incidents(kind="lost")
    return sorted((row["pid"], row["detail"]["reason"]) for row in rows if row["pid"] in pids)


def noted(daemon):
    """Return the pids in the daemon's note, as far as it can be read."""
    file = daemon.client.path.parent / "state" / "held.json"
    try:
        return {row["pid"] for row in json.loads(file.read_text())}
    except (FileNotFoundError, ValueError):
        return set()


def test_without_descriptors_it_says_so_and_serves_the_others_and_the_rest_when_there_are_some(serve, herd, run):
    daemon = serve()
    psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_NOFILE, (64, 64))
    pids = set(herd.start(30, run))
    daemon.process.expect(
        r"hookd WARNING: process \d+ and those found after it are not served: hookd may open 64 files"
    )
    kept = wait_until(lambda: served(daemon) if len(served(daemon)) >= 10 else None, what="the first targets")
    assert kept < pids
    up = daemon.metrics().select("hookd_target_up")  # others may train on this machine as well
    assert sum(one.labels["run"].startswith(run) for one in up) == len(kept)
    herd.end(sorted(kept), "exit")
    wait_until(lambda: served(daemon) == pids - kept, what="those that had no room, while the others linger")
    output = re.findall(r"process (\d+) and those found after it are not served", "\n".join(daemon.process.err))
    assert len(pids.intersection(map(int, output))) <= 1, "others may train on this machine as well"


def test_on_a_full_disk_it_starts_serves_and_says_that_nothing_is_kept(serve, herd, hold, run):
    daemon = serve()
    psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))  # of any file: EFBIG, as ENOSPC
    holder = hold()
    pids = herd.start(20, run)
    wait_until(lambda: served(daemon) >= {holder.pid, *pids}, what="discovery")
    tell(holder, incident={"kind": "nan", "message": "first NaN", "step": 3})
    daemon.process.expect(rf"hookd WARNING: nan in process {holder.pid} .*first NaN$")
    daemon.process.expect("hookd WARNING: incidents cannot be stored in ")
    daemon.process.expect("hookd WARNING: the next daemon will not know which targets were alive: ")
    assert daemon.metrics().total("hookd_incidents_total", kind="nan", run=run) == 0  # the holder counts none itself
    up = daemon.metrics().select("hookd_target_up")  # others may train on this machine as well
    assert sum(one.value for one in up if one.labels["run"].startswith(run)) == 21


def test_a_note_that_is_damaged_is_logged_and_replaced(serve, herd, run, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "held.json").write_text('[{"pid": "x"}, 3')
    (pid,) = herd.start(1, run)
    daemon = serve()
    daemon.process.expect("hookd WARNING: the targets that were alive when the last daemon ended are unknown: ")
    wait_until(lambda: pid in noted(daemon), what="a new note")


CLOCK = """
import os, time
_real = time.time
def _moved():
    try:
        with open({file!r}) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()
time.time = _moved
"""


def test_a_clock_that_is_set_ends_no_target_and_changes_no_value(serve, herd, run, tmp_path, monkeypatch):
    """The daemon's wall clock goes on by ten years, and then back by twenty."""
    offset = tmp_path / "offset"
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(file=str(offset)))
    monkeypatch.setattr("tests.support.daemon.tool_environment", lambda **more: with_path(tmp_path, **more))
    pids = set(herd.start(3, run))
    daemon = serve()
    wait_until(lambda: served(daemon) == pids, what="discovery")
    for years in (10, -10):
        offset.write_text(str(years * 365 * 86400))
        before = counters(daemon)
        (new,) = herd.start(1, run)
        pids.add(new)
        wait_until(lambda: served(daemon) == pids, what="one more target")
        after = counters(daemon)
        assert {key: value for key, value in before.items() if after[key] < value} == {}
    assert not lost(daemon, pids)
    herd.end([new], "kill")
    wait_until(lambda: served(daemon) == pids - {new}, what="its end")


def with_path(directory, **more):
    environment = tool_environment(**more)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [environment.get("PYTHONPATH")])]),
    }
