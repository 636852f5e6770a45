from __future__ import annotations

import sqlite3
import stat

import pytest

from hookd.daemon import incidents
from hookd.daemon.incidents import IncidentStore

TARGET = (11, 12345, 99)


@pytest.fixture
def store(tmp_path):
    opened = IncidentStore.open(tmp_path / "state")
    yield opened
    opened.close()


def nan(seq, **more):
    return {
        "seq": seq,
        "time": 1000.0 + seq,
        "kind": "nan",
        "message": f"nan {seq}",
        "module": "fc1",
        "step": 3,
        **more,
    }


def test_incidents_are_given_back_whole_and_the_newest_first(store):
    store.add(TARGET, "train.py", "0", [nan(1, where="output"), nan(2)])
    second, first = store.query()
    assert (second["seq"], first["seq"]) == (2, 1)
    assert {key: first[key] for key in ("pid", "run", "rank", "kind", "module", "step", "message", "time")} == {
        "pid": 11, "run": "train.py", "rank": "0", "kind": "nan", "module": "fc1", "step": 3, "message": "nan 1",
        "time": 1001.0,
    }  # fmt: skip
    assert first["detail"]["where"] == "output"


def test_an_incident_is_stored_once_however_often_it_is_seen(store):
    for _ in range(3):
        store.add(TARGET, "train.py", "0", [nan(1)])
    assert len(store.query()) == 1


def test_the_same_number_on_the_page_of_another_attach_is_another_incident(store):
    store.add(TARGET, "train.py", "0", [nan(1)])
    store.add((11, 12345, 100), "train.py", "0", [nan(1)])
    store.add((11, 99999, 99), "train.py", "0", [nan(1)])
    assert len(store.query()) == 3


def test_a_query_narrows_by_run_pid_kind_time_and_number(store):
    store.add(TARGET, "a", "0", [nan(1), nan(2, kind="hang")])
    store.add((12, 1, 1), "b", "0", [nan(3)])
    assert [row["seq"] for row in store.query(run="a")] == [2, 1]
    assert [row["seq"] for row in store.query(pid=12)] == [3]
    assert [row["seq"] for row in store.query(kind="hang")] == [2]
    assert [row["seq"] for row in store.query(since=1002.0)] == [3, 2]
    assert [row["seq"] for row in store.query(limit=1)] == [3]
    assert store.query(run="' OR 1=1 --") == []


def test_what_is_old_is_forgotten(store):
    store.add(TARGET, "a", "0", [nan(1), nan(5)])
    store.prune(1003.0)
    assert [row["seq"] for row in store.query()] == [5]


def test_a_hostile_incident_is_stored_as_far_as_it_makes_sense(store):
    store.add(TARGET, "a", "0", [{"seq": 1, "time": "x", "step": True, "module": ["a"], "kind": 3, "message": None}])
    (row,) = store.query()
    assert (row["step"], row["module"], row["kind"]) == (None, None, "3")


def test_the_file_can_be_read_while_it_is_written(store, tmp_path):
    store.add(TARGET, "a", "0", [nan(1)])
    reader = incidents.read_only(tmp_path / "state")
    assert len(incidents.query(reader)) == 1
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("DELETE FROM incidents")
    store.add(TARGET, "a", "0", [nan(2)])
    assert len(incidents.query(reader)) == 2
    reader.close()


def test_the_directory_is_the_owners_alone_and_the_store_survives_a_restart(tmp_path):
    for seq in (1, 2):
        store = IncidentStore.open(tmp_path / "state")
        store.add(TARGET, "a", "0", [nan(seq)])
        store.close()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    store = IncidentStore.open(tmp_path / "state")
    assert len(store.query()) == 2
    store.close()


def test_without_a_store_there_is_nothing_to_read(tmp_path):
    assert incidents.read_only(tmp_path) is None


@pytest.mark.parametrize("break_it", ["newer", "nonsense", "a file"])
def test_a_store_that_cannot_be_used_is_left_alone_and_memory_serves(tmp_path, caplog, break_it):
    state = tmp_path / "state"
    if break_it == "a file":
        state.write_text("")
    else:
        state.mkdir()
    if break_it == "newer":
        with sqlite3.connect(state / incidents.NAME) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
    elif break_it == "nonsense":
        (state / incidents.NAME).write_bytes(b"nonsense" * 1000)
    store = IncidentStore.open(state)
    store.add(TARGET, "a", "0", [nan(1)])
    assert len(store.query()) == 1
    assert "in memory only" in caplog.text
    store.close()


def test_what_the_daemon_sees_itself_is_numbered_below_the_end_and_counted_for_the_next_daemon(store, tmp_path):
    assert store.tell(TARGET, "a", "0", {"kind": "hang", "message": "silent"})
    assert store.tell(TARGET, "a", "0", {"kind": "lost", "message": "died", "seq": incidents.END})
    assert not store.tell(TARGET, "a", "0", {"kind": "lost", "message": "died", "seq": incidents.END}), (
        "there is one end"
    )
    assert store.tell(TARGET, "a", "0", {"kind": "hang", "message": "silent again"})
    store.add(TARGET, "a", "0", [nan(1)])
    assert sorted(row["seq"] for row in store.query()) == [-3, -2, -1, 1]
    other = IncidentStore.open(tmp_path / "state")
    assert other.told(TARGET) == {"hang": 2, "lost": 1}
    assert other.told((11, 12345, 100)) == {}
    other.close()
