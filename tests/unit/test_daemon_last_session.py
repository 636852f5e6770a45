"""The notes of one daemon for the next: which processes are alive, and therefore which have gone."""

from __future__ import annotations

import json
import os
import stat
import time

import pytest

from hookd.tool.daemon.fleet.fleet import Fleet
from hookd.tool.daemon.fleet.last_session import NOTE_S, LastSession
from hookd.tool.daemon.incidents.store import IncidentStore, boot_id
from hookd.tool.linux import proc


@pytest.fixture
def fleet(stack, tmp_path):
    store = IncidentStore.open(tmp_path / "store")
    stack.callback(store.close)
    return Fleet(store, linger_s=1)


@pytest.fixture
def note(tmp_path):
    """Return a function that writes the notes of an earlier daemon: by default about a process that is gone."""

    def write(**changes):
        row = {
            "pid": 2**22 + 1, "start_ticks": 5, "page": [1, 7], "run": "job", "rank": "3", "seen": 1e9, "step": 41,
            "is_absolute": True, "boot": boot_id(), **changes,
        }  # fmt: skip
        path = tmp_path / "held.json"
        path.write_text(json.dumps([row]))
        return path

    return write


def reported(fleet):
    return [(row["pid"], row["rank"], row["step"], row["message"]) for row in fleet.incidents(kind="lost")]


def test_who_has_gone_is_reported_with_the_step_and_the_time_at_which_it_was_last_seen(fleet, note, caplog):
    LastSession(note(), fleet).poll([])
    pid = 2**22 + 1
    message = (
        f"process {pid} was gone when the daemon came back: last seen alive at 2001-09-09 01:46:40 UTC, how it ended is "
        "unknown"
    )
    assert reported(fleet) == [(pid, "3", 41, message)]
    assert f"lost in process {pid} (run job, rank 3) at step 41: {message}" in caplog.messages


def test_who_was_noted_in_another_time_namespace_is_the_same_process(fleet, note):
    hours_10 = 36_000 * os.sysconf("SC_CLK_TCK")
    shifted = proc.start_ticks(os.getpid()) + hours_10
    LastSession(note(pid=os.getpid(), start_ticks=shifted, offset=hours_10), fleet).poll([])
    assert reported(fleet) == []
    LastSession(note(pid=os.getpid(), start_ticks=shifted), fleet).poll([])
    assert len(reported(fleet)) == 1, "as an older hookd has written it: it is another process then"


def test_of_the_time_before_a_boot_all_are_gone_whatever_runs_under_their_pids(fleet, note):
    LastSession(note(pid=os.getpid(), start_ticks=proc.start_ticks(os.getpid()), boot="earlier"), fleet).poll([])
    ((_, _, _, message),) = reported(fleet)
    assert message.endswith("; the machine has been booted since")


def test_a_process_that_still_runs_is_not_reported_and_another_process_of_that_pid_is_another(fleet, note):
    ticks = proc.start_ticks(os.getpid())
    LastSession(note(pid=os.getpid(), start_ticks=ticks), fleet).poll([])
    assert reported(fleet) == []
    LastSession(note(pid=os.getpid(), start_ticks=ticks + 1), fleet).poll([])
    assert [row[0] for row in reported(fleet)] == [os.getpid()]


def test_it_is_reported_once_even_if_the_daemon_is_killed_before_the_next_note(fleet, note):
    for _ in range(2):
        LastSession(note(), fleet).poll([])
    assert len(reported(fleet)) == 1


@pytest.mark.parametrize("text", ["", "{", "[3]", '[{"pid": 1}]', '{"pid": 1}', "[[]]", "\x00" * 100, "[1e999]"])
def test_a_note_that_is_damaged_is_replaced(fleet, tmp_path, text, caplog):
    path = tmp_path / "held.json"
    path.write_text(text)
    LastSession(path, fleet).poll([])
    assert json.loads(path.read_text()) == []
    assert "the targets that were alive when the last daemon ended are unknown" in caplog.text


def test_the_file_is_written_when_somebody_comes_and_then_now_and_then(fleet, tmp_path):
    now, path = [0.0], tmp_path / "held.json"
    session = LastSession(path, fleet, lambda: now[0])
    session.poll([])
    path.unlink()
    session.poll([])
    assert not path.exists(), "nothing has changed"
    now[0] += NOTE_S
    session.poll([])
    assert path.exists()


def test_the_file_is_its_owners_alone_whatever_the_umask_and_whatever_lay_there(fleet, note):
    path = note()
    for old in (path, path.with_suffix(".new")):
        old.touch()
        old.chmod(0o666)
    before = os.umask(0)
    try:
        LastSession(path, fleet).poll([])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.with_suffix(".new").exists()


def test_incidents_are_forgotten_by_their_distance_from_the_newest_not_by_a_clock_that_was_set(fleet, monkeypatch):
    for age_s in (3000.0, 10.0):
        fleet.store.add((int(age_s), 1, 1), "job", "0", [{"seq": 1, "time": time.time() - age_s, "kind": "nan"}])
    monkeypatch.setattr("hookd.tool.daemon.fleet.fleet.time.time", lambda: 4e9)
    fleet.forget(3600)
    assert len(fleet.incidents()) == 2
    fleet.forget(60)
    fleet.store.flush()
    assert len(fleet.incidents()) == 1
