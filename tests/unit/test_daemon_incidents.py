from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from hookd.tool.daemon.incidents import store as incidents
from hookd.tool.daemon.incidents.database import SCHEMA, STEPS
from hookd.tool.daemon.incidents.receivers import FunctionReceiver
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.watch import drift, hangs, stragglers
from tests.support.environment import tool_environment
from tests.support.processes import wait_until

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
        "module": f"fc{seq}",
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
    assert store.flush()
    with contextlib.closing(incidents.read_only(tmp_path / "state")) as reader:
        assert len(incidents.query(reader)) == 1
        with pytest.raises(sqlite3.OperationalError):
            reader.execute("DELETE FROM incidents")
        store.add(TARGET, "a", "0", [nan(2)])
        assert store.flush()
        assert len(incidents.query(reader)) == 2
        (row,) = reader.execute("SELECT id, at, run, kind, message FROM readable LIMIT 1").fetchall()
        assert row == (1, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1001)), "a", "nan", "nan 1")


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


@pytest.mark.parametrize("break_it", ["newer", "a file"])
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
    store = IncidentStore.open(state)
    store.add(TARGET, "a", "0", [nan(1)])
    assert len(store.query()) == 1
    assert "cannot be stored in" in caplog.text
    store.close()


def test_what_the_daemon_sees_itself_is_numbered_below_the_end_and_counted_for_the_next_daemon(store, tmp_path):
    assert store.add_own(TARGET, "a", "0", {"kind": "hang", "message": "silent"})
    assert store.add_own(TARGET, "a", "0", {"kind": "lost", "message": "died", "seq": incidents.END})
    assert not store.add_own(TARGET, "a", "0", {"kind": "lost", "message": "died", "seq": incidents.END}), (
        "there is one end"
    )
    assert store.add_own(TARGET, "a", "0", {"kind": "corrupt", "message": "spoilt"})
    store.add(TARGET, "a", "0", [nan(1)])
    assert sorted(row["seq"] for row in store.query()) == [-3, -2, -1, 1]
    store.flush()
    other = IncidentStore.open(tmp_path / "state")
    assert other.own(TARGET).counts == {"hang": 1, "lost": 1, "corrupt": 1}
    assert other.own((11, 12345, 100)).counts == {}
    other.close()


def test_what_lasts_is_stored_once_by_however_many_daemons_until_it_is_over(tmp_path):
    here, there = (IncidentStore(tmp_path / incidents.NAME) for _ in range(2))
    heard = Heard()
    there.listen(heard)

    def announced(store, kind):
        is_new = store.add_own(TARGET, "a", "0", {"kind": kind, "message": kind})
        assert store.flush()
        return is_new

    assert [announced(one, "hang") for one in (here, there)] == [True, False]
    assert list(there.own(TARGET).ongoing) == ["hang"]
    assert [announced(one, "hang_over") for one in (there, here)] == [True, False]
    assert there.own(TARGET).ongoing == {}
    assert [announced(one, "hang") for one in (here, there)] == [True, False]
    assert [row["kind"] for row in here.query(order="id")] == ["hang", "hang_over", "hang"]
    wait_until(lambda: len(heard.rows) == 3, what="who listens to the slower one hears of all")
    assert [row["id"] for row in heard.rows] == [row["id"] for row in here.query(order="id")[::-1]]
    for one in (here, there):
        one.close()


def test_what_lasts_is_known_to_when_its_beginning_was_pruned(store):
    for kind, when in (("hang", 10.0), ("hang_over", 30.0), ("hang", 40.0)):
        assert store.add_own(TARGET, "a", "0", {"kind": kind, "message": "m", "time": when})
    store.prune(20.0)
    assert store.flush()
    assert store.own(TARGET).ongoing == {"hang": {"time": 40.0, "message": "m"}}
    assert not store.add_own(TARGET, "a", "0", {"kind": "hang", "message": "the same"})


def test_half_a_character_and_a_time_to_come_are_made_storable(store, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.incidents.rows.time", types.SimpleNamespace(time=lambda: 1000.0))
    store.add(TARGET, "a", "0", [nan(1, message="x\ud800y", module="\udfff", time=1e18)])
    assert store.flush()
    (row,) = store.query()
    assert (row["message"], row["module"]) == ("x?y", "?")
    assert row["time"] == 1060.0, "a minute ahead at most"


# ---- equal ones are one


def spike(seq, **more):
    message = f"loss {seq / 7:.3f} is {seq}e+02 times its mean"
    return {"seq": seq, "time": 1000.0 + seq, "kind": "loss_spike", "message": message, "step": seq, **more}


def test_equal_incidents_of_a_process_are_one_row_with_a_count_a_first_and_a_last_time(store):
    store.add(TARGET, "a", "0", [spike(1), nan(2), spike(3)])
    assert store.flush()
    number = store.query(kind="loss_spike")[0]["id"]
    store.add(TARGET, "a", "0", [spike(4), spike(5, module="fc1"), spike(6, kind="leak")])
    store.add((12, 1, 1), "a", "0", [spike(7)])
    first, *others = [row for row in store.query(order="id")[::-1] if row["kind"] == "loss_spike"]
    assert (first["id"], first["seq"], first["message"]) == (number, 1, spike(1)["message"])
    assert (first["count"], first["time"], first["last"]) == (3, 1001.0, 1004.0)
    assert [(row["pid"], row["module"], row["count"]) for row in others] == [(11, "fc1", 1), (12, None, 1)]
    assert sorted(row["id"] for row in store.query()) == list(range(1, 6)), "what is counted uses up no number"


def test_what_was_counted_is_not_counted_again_by_another_daemon_or_the_next(tmp_path):
    here, there = (IncidentStore(tmp_path / incidents.NAME) for _ in range(2))
    for store in (here, there):
        store.add(TARGET, "a", "0", [spike(seq) for seq in (1, 2, 3)])
        assert store.flush()
    for store in (there, here):
        store.add(TARGET, "a", "0", [spike(4)])
        assert store.flush()
    assert [row["count"] for row in here.query()] == [4]
    assert (here.seen(TARGET), here.seen((12, 1, 1))) == (4, 0)
    for store in (here, there):
        store.close()


def test_what_waits_for_the_disk_is_one_row_with_what_is_in_the_file(tmp_path):
    path = tmp_path / incidents.NAME
    store = IncidentStore(path, retry_s=0.01)
    store.add(TARGET, "a", "0", [spike(1)])
    assert store.flush()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for seq in range(2, 50):
            store.add(TARGET, "a", "0", [spike(seq)])
        (row,) = store.query()
        assert (row["id"], row["count"], row["last"]) == (1, 49, 1049.0)
        other.execute("ROLLBACK")
    wait_until(store.flush, what="the file is free")
    assert [(row["id"], row["count"], row["last_seq"]) for row in store.query()] == [(1, 49, 49)]
    store.close()


class Meanwhile:
    """A receiver whose question is asked while the writing thread has a batch in hand."""

    name = "meanwhile"

    def __init__(self, come):
        self._come = [come]

    def wants(self, _incident):
        if threading.current_thread() is not threading.main_thread() and self._come:
            self._come.pop()()
        return False


def test_an_equal_incident_that_comes_while_the_first_is_written_is_counted(tmp_path):
    store = IncidentStore(tmp_path / incidents.NAME)
    store.listen(Meanwhile(lambda: store.add(TARGET, "a", "0", [spike(2)])))
    store.add(TARGET, "a", "0", [spike(1)])
    assert store.flush()
    assert [(row["count"], row["last_seq"]) for row in store.query()] == [(2, 2)]
    store.close()


def test_what_is_being_written_is_counted_with_what_has_come_since(tmp_path, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.incidents.store.ANSWER_S", 0.0)
    begun, may_end = threading.Event(), threading.Event()
    store = IncidentStore(tmp_path / incidents.NAME)
    store.listen(Meanwhile(lambda: (begun.set(), may_end.wait(60))))
    store.add(TARGET, "a", "0", [spike(1), spike(2)])
    assert begun.wait(60)
    store.add(TARGET, "a", "0", [spike(3)])
    assert [(row["count"], row["last_seq"]) for row in store.query()] == [(3, 3)]
    may_end.set()
    assert store.flush()
    assert [(row["count"], row["last_seq"]) for row in store.query()] == [(3, 3)]
    store.close()


def test_a_receiver_is_notified_again_when_the_count_has_one_more_digit(tmp_path):
    heard = Heard()
    store = listening(tmp_path / incidents.NAME, heard)
    for seq in range(1, 121):
        store.add(TARGET, "a", "0", [spike(seq)])
        assert store.flush()
    assert [(row["id"], row["count"]) for row in heard.rows] == [(1, 1), (1, 10), (1, 100)]
    store.close()


# ---- owners


def flood(store, count, owner, pid=11, begin=1, **more):
    for at in range(begin, begin + count, 100):
        store.add(
            (pid, 1, 1),
            f"run{owner}",
            "0",
            [nan(seq, note="x" * 1000, **more) for seq in range(at, at + 100)],
            owner=owner,
        )
        assert store.flush()


def test_a_full_store_evicts_of_who_holds_most_and_of_these_the_oldest(tmp_path):
    store = IncidentStore(tmp_path / incidents.NAME, max_bytes=600_000)
    store.add((12, 1, 1), "victim", "0", [nan(1)], owner=2)
    store.add((13, 1, 1), "run1", "1", [nan(1, time=1.0)], owner=1)  # a small target of the flooding user, the oldest
    flood(store, 3000, owner=1)
    flood(store, 100, owner=3, pid=14)
    store.add((12, 1, 1), "victim", "0", [nan(2)], owner=2)
    assert store.flush()
    assert {row["seq"] for row in store.query(pid=12)} == {1, 2}
    assert len(store.query(pid=13)) == 1
    assert len(store.query(pid=14)) == 100
    kept = [row["seq"] for row in store.query(pid=11)]
    assert kept == list(range(3000, 3000 - len(kept), -1))
    assert 100 < len(kept) < 500
    store.close()


@pytest.mark.parametrize("disk", ["on disk", "in memory"])
def test_of_a_flood_others_are_listed_too(tmp_path, disk):
    store = IncidentStore(tmp_path / incidents.NAME if disk == "on disk" else None)
    store.add((12, 1, 1), "victim", "0", [nan(1)], owner=2)
    store.add((13, 1, 1), "other", "0", [nan(1)], owner=1)
    for pid in range(20, 40):
        store.add((pid, 1, 1), "flood", "0", [nan(seq, time=2000.0 + pid) for seq in range(1, 101)], owner=1)
    store.flush()  # the writer numbers them; those without a number come first
    for order in ("id", "time"):
        rows = store.query(limit=50, order=order)
        assert len(rows) == 50
        assert "victim" in {row["run"] for row in rows}
        assert rows == sorted(
            rows, key=lambda row: row["id" if order == "id" and disk == "on disk" else "last"], reverse=True
        )
    rows = store.query(limit=50, pid=39)
    assert [row["seq"] for row in rows] == list(range(100, 50, -1)), "of one target they are the last"
    assert store.query(limit=1, run="other")
    store.close()


@pytest.mark.parametrize("disk", [True, False])
def test_a_run_of_two_users_is_asked_for_by_user_and_a_flood_leaves_the_others_in_the_list(tmp_path, disk):
    store = IncidentStore(tmp_path / "incidents.sqlite" if disk else None)
    store.add((12, 1, 1), "llama", "0", [nan(seq) for seq in (1, 2)], owner=2)
    store.add((11, 1, 1), "llama", "0", [nan(seq, time=2000.0 + seq) for seq in range(1, 301)], owner=1)
    assert [(row["owner"], row["seq"]) for row in store.query(run="llama", user=2)] == [(2, 2), (2, 1)]
    assert {row["owner"] for row in store.query(run="llama", user=1)} == {1}
    assert store.query(run="llama", user=3) == []
    listed = store.query(run="llama", limit=50)
    assert len(listed) == 50
    assert [row["seq"] for row in listed if row["owner"] == 2] == [2, 1]
    store.close()


def test_of_a_run_of_one_user_the_newest_are_listed_whichever_rank_they_are_of(store):
    store.add((12, 1, 1), "llama", "0", [nan(1)], owner=1)
    store.add((11, 1, 1), "llama", "1", [nan(seq, time=2000.0 + seq) for seq in range(1, 101)], owner=1)
    store.flush()
    assert {row["pid"] for row in store.query(run="llama", limit=50)} == {11}


def test_every_row_that_leaves_the_store_says_whose_it_is(store):
    announced = []
    receiver = FunctionReceiver("pager", announced.append, store)
    store.listen(receiver)
    for pid, owner in ((11, 0), (12, 4_000_000_001), (13, -1)):
        store.add((pid, 1, 1), "llama", "0", [nan(1)], owner=owner)
    waiting = store.query()
    assert store.flush()
    users = {11: "root", 12: "4000000001", 13: ""}
    for rows in (waiting, store.query(), store.query(run="llama"), store.query(id=1)):
        assert {row["pid"]: row["user"] for row in rows}.items() <= users.items()
    wait_until(lambda: len(announced) == 3)
    assert {row["pid"]: row["user"] for row in announced} == users
    receiver.close()


def test_what_is_reported_after_a_restart_says_whose_it_is(store):
    class Deaf:
        name = "deaf"
        wants = staticmethod(lambda _: True)
        receive = staticmethod(lambda _: None)

    store.listen(Deaf)
    store.add(TARGET, "llama", "0", [nan(1)], owner=0)
    assert [row["user"] for row in store.undelivered("deaf", 10)] == ["root"]


def test_of_one_target_that_floods_the_others_of_its_user_are_listed_too(store):
    store.add((12, 1, 1), "quiet", "0", [nan(1)], owner=1)
    store.add((11, 1, 1), "flood", "0", [nan(seq) for seq in range(1, 1000)], owner=1)
    assert "quiet" in {row["run"] for row in store.query(limit=15)}


def test_what_is_listed_by_way_of_the_index_is_what_is_listed_of_all(store):
    for n in range(60):
        rows = [nan(seq, time=1000.0 + n * 7 % 50 + seq) for seq in range(1, 2 + n)]
        store.add((n % 7, n % 3, n), f"run{n}", "0", rows, owner=n % 4)
    store.add(
        (3, 2, 59), "run59", "0", [nan(70, module="fc1", message="nan 1", time=9000.0)], owner=3
    )  # its first again
    assert store.flush()
    for order in ("id", "time"):
        for limit in (1, 15, 50, 1000):
            listed = [row["id"] for row in store.query(limit=limit, order=order)]
            assert listed == [row["id"] for row in store.query(limit=limit, order=order, since=0.0)]


def test_of_incidents_that_wait_for_a_disk_those_of_who_has_most_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.incidents.write_queue.MAX_WAITING", 100)
    store = IncidentStore(None)
    store.add((12, 1, 1), "victim", "0", [nan(1)], owner=2)
    for begin in range(1, 1000, 10):
        store.add((11, 1, 1), "flood", "0", [nan(seq) for seq in range(begin, begin + 10)], owner=1)
    assert [row["seq"] for row in store.query(run="victim")] == [1]
    assert store.query(run="flood")[0]["seq"] == 1000
    assert len(store.query()) <= 100
    monkeypatch.setattr("hookd.tool.daemon.incidents.write_queue.MAX_WAITING_BYTES", 100_000)
    store.add((11, 1, 1), "flood", "0", [nan(seq, note="x" * 10_000) for seq in range(2000, 2050)], owner=1)
    assert store._queue._bytes < 120_000 * 5
    assert [row["seq"] for row in store.query(run="victim")] == [1]
    store.close()


def test_undelivered_ones_are_given_out_in_equal_shares(tmp_path):
    store = listening(tmp_path / incidents.NAME, Heard())
    store.add((11, 1, 1), "flood", "0", [nan(seq) for seq in range(1, 300)], owner=1)
    store.add((12, 1, 1), "victim", "0", [nan(1)], owner=2)
    assert store.flush()
    assert "victim" in {row["run"] for row in store.undelivered("heard", 10)}
    store.close()


# ---- older files, and newer ones


def schema_1(path):
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        for statement in STEPS[0]:
            old.execute(statement)
        old.execute("INSERT INTO incidents VALUES (7, 'b', 1, 2, 3, 4, 5.0, 'r', '0', 'nan', NULL, 6, 'old', '{}')")
        old.execute("INSERT INTO dismissed VALUES ('b', 1, 2, 3.0)")
        old.execute("PRAGMA user_version = 1")


def test_a_file_of_the_first_schema_is_brought_up_to_date_and_keeps_its_rows_and_numbers(tmp_path):
    path = tmp_path / "state" / incidents.NAME
    schema_1(path)
    store = IncidentStore(path)
    (row,) = store.query()
    assert (row["id"], row["message"], row["detail"]) == (7, "old", {})
    store.prune(100.0)
    store.add(TARGET, "r", "0", [nan(1)])
    assert [row["id"] for row in store.query()] == [8], "a number is never given again"
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert file.execute("PRAGMA auto_vacuum").fetchone() == (2,)


def schema_2(path):
    schema_1(path)
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        for statement in STEPS[1]:
            old.execute(statement)
        old.execute("INSERT INTO notices VALUES ('heard', 7, NULL)")
        old.execute("PRAGMA user_version = 2")


def test_a_file_of_the_second_schema_is_read_as_it_is_and_then_brought_up_to_date(tmp_path):
    path = tmp_path / "state" / incidents.NAME
    schema_2(path)
    with contextlib.closing(incidents.read_only(tmp_path / "state")) as reader:
        (row,) = incidents.query(reader)
        assert (row["id"], row["message"], row["owner"], row["count"], row["last"]) == (7, "old", -1, 1, 5.0)
        assert incidents.query(reader, since=6.0) == []
    store = IncidentStore(path)
    assert store.query() == [row]
    assert [one["id"] for one in store.undelivered("heard", 10)] == [7]
    store._boot = "b"
    store.add((1, 2, 3), "r", "0", [nan(4), nan(5)])  # the first of them is the one that is there
    assert [one["id"] for one in store.query(order="id")] == [8, 7]
    assert store.seen((1, 2, 3)) == 5
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
        assert file.execute("SELECT message, count, last FROM readable WHERE id = 7").fetchone()[:2] == ("old", 1)


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "state" / incidents.NAME
    schema_1(path)
    monkeypatch.setattr("hookd.tool.daemon.incidents.database.STEPS", (*STEPS, ("CREATE TABLE more (x)", "nonsense")))
    monkeypatch.setattr("hookd.tool.daemon.incidents.database.SCHEMA", len(STEPS) + 1)
    store = IncidentStore(path)
    store.add(TARGET, "r", "0", [nan(1)])
    assert not store.flush()
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (1,)
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"incidents", "dismissed"}


# ---- files that break


def filled(path, rows=300):
    store = IncidentStore(path)
    store.add(TARGET, "r", "0", [nan(seq, note="x" * 200) for seq in range(1, rows + 1)])
    store.close()


@pytest.mark.parametrize("damage", ["no database", "cut off", "a bad page"])
def test_a_damaged_file_is_kept_under_another_name_and_a_new_one_begins(tmp_path, caplog, damage):
    path = tmp_path / "state" / incidents.NAME
    filled(path)
    data = path.read_bytes()
    bad = {
        "no database": b"nonsense" * 1000,
        "cut off": data[: len(data) // 2 + 100],
        "a bad page": data[:8192] + os.urandom(8192) + data[16384:],
    }[damage]
    path.write_bytes(bad)
    store = IncidentStore(path)
    wait_until(lambda: list(path.parent.glob("*.corrupt-*")), what="the file is renamed")
    store.add(TARGET, "r", "0", [nan(1001)])
    assert store.flush()
    assert [row["seq"] for row in store.query()] == [1001]
    store.close()
    (kept,) = path.parent.glob("*.corrupt-*")
    assert kept.read_bytes()[4096:] == bad[4096:], "but for the counter of changes in its head"
    assert f"kept as {kept.name}" in caplog.text
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_can_be_read_of_a_damaged_file_goes_on_under_its_number(tmp_path, caplog):
    path = tmp_path / "state" / incidents.NAME
    filled(path)
    data = path.read_bytes()
    middle = len(data) // 2 >> 12 << 12
    path.write_bytes(data[:middle] + os.urandom(4096) + data[middle + 4096 :])
    store = IncidentStore(path)
    wait_until(lambda: list(path.parent.glob("*.corrupt-*")), what="the file is renamed")
    store.add(TARGET, "r", "0", [nan(1001)])
    assert store.flush()
    new, *old = store.query(order="id")
    assert (new["seq"], new["id"]) == (1001, 301), "a number is never given again"
    assert 250 < len(old) < 300
    assert all(
        (row["id"], row["message"], row["detail"]["note"]) == (row["seq"], f"nan {row['seq']}", "x" * 200)
        for row in old
    )
    assert f"begins with the {len(old)} incidents that can be read" in caplog.text
    store.close()


def test_a_file_that_another_daemon_has_replaced_is_not_renamed(tmp_path):
    path = tmp_path / "state" / incidents.NAME
    store = IncidentStore(path)
    path.rename(path.with_name("away"))
    filled(path, rows=3)
    store._queue._suspect(sqlite3.DatabaseError("database disk image is malformed"))
    store.add(TARGET, "r", "0", [nan(4)])
    assert store.flush()
    assert len(store.query()) == 4
    assert not list(path.parent.glob("*.corrupt-*"))
    store.close()


# ---- a disk that is full, or slow


def test_a_full_disk_is_reported_once_and_what_came_meanwhile_is_stored_when_there_is_room(tmp_path, caplog):
    store = IncidentStore(tmp_path / incidents.NAME, retry_s=0.01)
    store.add(TARGET, "r", "0", [nan(1)])
    assert store.flush()
    (pages,) = store._queue._writer.execute("PRAGMA page_count").fetchone()
    store._queue._writer.execute(f"PRAGMA max_page_count = {pages}")
    for seq in range(2, 60):
        store.add(TARGET, "r", "0", [nan(seq, note="x" * 1000)])
        assert len(store.query(limit=1000)) == seq
    assert not store.flush()
    assert store.add_own(TARGET, "r", "0", {"kind": "lost", "message": "x", "seq": incidents.END})
    assert not store.add_own(TARGET, "r", "0", {"kind": "lost", "message": "x", "seq": incidents.END})
    assert store.own(TARGET).counts == {"lost": 1}
    assert [row["id"] for row in store.query(kind="lost")] == [None]
    assert len([one for one in caplog.records if "cannot be stored in" in one.message]) == 1
    store._queue._writer.execute("PRAGMA max_page_count = 1000000")
    wait_until(store.flush, what="there is room again")
    assert "stored again" in caplog.text
    store.close()
    store = IncidentStore(tmp_path / incidents.NAME)
    assert len(store.query()) == 60
    store.close()


def test_what_is_stored_is_listed_where_the_file_cannot_be_written(tmp_path, monkeypatch, caplog):
    path = tmp_path / "state" / incidents.NAME
    filled(path, rows=3)

    def refuse(_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("hookd.tool.daemon.incidents.database.open_to_write", refuse)
    store = IncidentStore(path, retry_s=0.01)
    store.add(TARGET, "r", "0", [nan(4)])
    assert [row["id"] for row in store.query(order="id")] == [None, 3, 2, 1]
    assert store.seen(TARGET) == 3
    assert "free space there, or use another --state-dir" in caplog.text
    monkeypatch.undo()
    wait_until(store.flush, what="it can be written")
    assert [row["id"] for row in store.query(order="id")] == [4, 3, 2, 1]
    store.close()


def test_who_stores_does_not_wait_for_a_file_that_somebody_has_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.incidents.database.BUSY_S", 3600)  # SQLite itself waits for so long
    store = IncidentStore(tmp_path / incidents.NAME, retry_s=0.01)
    with contextlib.closing(sqlite3.connect(tmp_path / incidents.NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        store.add(TARGET, "r", "0", [nan(1)])
        store.add_own(TARGET, "r", "0", {"kind": "hang", "message": "x"})
        assert len(store.query()) == 2
        other.execute("ROLLBACK")
    assert store.flush()
    store.close()


def test_the_file_keeps_to_its_size_and_the_oldest_go_first(tmp_path):
    path = tmp_path / incidents.NAME
    store = IncidentStore(path, max_bytes=400_000)
    for seq in range(1, 2001):
        store.add(TARGET, "r", "0", [nan(seq, note="x" * 1000)])
        if seq % 100 == 0:
            assert store.flush()
    assert path.stat().st_size + path.with_name(path.name + "-wal").stat().st_size < 8_000_000
    store.add(TARGET, "r", "0", [nan(2001)])
    assert store.flush()
    assert path.stat().st_size < 2_000_000
    kept = [row["seq"] for row in store.query()]
    assert kept == list(range(2001, 2001 - len(kept), -1))
    assert 100 < len(kept) < 400
    store.close()


def test_a_reader_that_never_ends_costs_no_disk_without_bound(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hookd.tool.daemon.incidents.database.MAX_LOG_BYTES", 1_000_000)
    path = tmp_path / incidents.NAME
    store = IncidentStore(path, retry_s=0.01)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM incidents").fetchall()
        for seq in range(1, 400):
            store.add(TARGET, "r", "0", [nan(seq, note="x" * 10_000)])
            store.flush()
        assert path.with_name(path.name + "-wal").stat().st_size < 1_200_000
        assert "a reader that does not end" in caplog.text
        other.execute("ROLLBACK")
    wait_until(store.flush, what="the log is shortened")
    assert len(store.query()) == 399
    store.close()


# ---- kill -9

KILLS = """
import itertools, os, random, signal, sys, time
from pathlib import Path
from hookd.tool.daemon.incidents.store import IncidentStore

def stores(first, out):
    store = IncidentStore(Path(sys.argv[1]), max_bytes=1e9)
    for seq in itertools.count(first):
        store.add((1, 1, 1), "r", "0", [{"seq": seq, "kind": "nan", "message": "x" * (seq % 3000)}])
        if store.flush():
            os.write(out, b"%d " % seq)

moment, last = random.Random(1), 0
for _ in range(20):
    end, out = os.pipe()
    if not (pid := os.fork()):
        stores(last + 1, out)
    os.close(out)
    reported = os.read(end, 100)
    time.sleep(moment.uniform(0, 0.03))  # the moment is what is tried
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(end, 65536):
        reported += more
    os.close(end)
    print(reported.decode(), flush=True)
    last = int(reported.split()[-1]) + 1
"""


def test_what_was_reported_as_stored_survives_kill_9_at_any_moment(tmp_path):
    path = tmp_path / "state" / incidents.NAME
    schema_1(path)
    words = [sys.executable, "-c", KILLS, path]
    done = subprocess.run(words, env=tool_environment(), check=True, capture_output=True, text=True, timeout=60)
    reported = {int(number) for number in done.stdout.split()}
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = {seq for (seq,) in file.execute("SELECT seq FROM incidents WHERE boot != 'b'")}
        assert file.execute("SELECT message FROM incidents WHERE id = 7").fetchone() == ("old",)
    assert len(done.stdout.splitlines()) == 20
    assert reported <= stored
    assert not list(path.parent.glob("*.corrupt-*"))


# ---- receivers


class Heard:
    name = "heard"

    def __init__(self):
        self.rows = []

    def wants(self, incident):
        return incident["kind"] != "option"

    def receive(self, incident):
        self.rows.append(incident)

    @property
    def seqs(self):
        return [row["seq"] for row in self.rows]


def listening(path, heard):
    store = IncidentStore(path, retry_s=0.01)
    store.listen(heard)
    return store


def test_a_receiver_is_notified_once_and_what_it_has_not_dealt_with_is_given_out_after_a_restart(tmp_path):
    heard = Heard()
    store = listening(tmp_path / incidents.NAME, heard)
    for _ in range(2):
        store.add(TARGET, "r", "0", [nan(1), nan(2), nan(3, kind="option")])
        store.flush()
    assert heard.seqs == [1, 2]
    assert [row["id"] for row in heard.rows] == [1, 2]
    store.delivered("heard", [heard.rows[0]])
    assert [row["seq"] for row in store.undelivered("heard", 10)] == [2]
    store.close()
    store = listening(tmp_path / incidents.NAME, heard)
    store.add(TARGET, "r", "0", [nan(1), nan(2)])  # the page tells of them to the next daemon too
    assert [row["seq"] for row in store.undelivered("heard", 10)] == [2]
    assert store.undelivered("another", 10) == []
    assert heard.seqs == [1, 2]
    store.close()


def test_receivers_are_notified_while_the_disk_is_full_too(tmp_path):
    heard = Heard()
    store = listening(tmp_path / incidents.NAME, heard)
    store._queue._writer.execute("PRAGMA max_page_count = 1")
    store.add(TARGET, "r", "0", [nan(seq, note="x" * 1000) for seq in range(1, 30)])
    wait_until(lambda: len(heard.rows) == 29, what="the receiver is notified")
    assert not store.flush()
    store.delivered("heard", heard.rows)
    store._queue._writer.execute("PRAGMA max_page_count = 1000000")
    wait_until(store.flush, what="there is room again")
    assert store.undelivered("heard", 100) == []
    assert len(heard.rows) == 29
    store.close()


def test_a_function_that_fails_or_hangs_holds_up_nobody(store):
    heard, hold, called = Heard(), threading.Event(), []

    def call(incident):
        called.append(incident["seq"])
        if incident["seq"] == 1:
            raise RuntimeError("mine")
        hold.wait(600)

    caller = FunctionReceiver("slow", call, store)
    store.listen(caller)
    store.listen(heard)
    store.add(TARGET, "r", "0", [nan(seq) for seq in range(1, 30)])
    assert store.flush()
    wait_until(lambda: called == [1, 2] and len(heard.rows) == 29, what="the other is notified")
    hold.set()
    caller.close()
    assert store.flush()
    assert store.undelivered("slow", 10) == []


def test_every_kind_of_incident_stands_in_the_documentation():
    root = Path(__file__).parents[2]
    sources = [
        *root.glob("plugins/hookd_*/*.py"),
        *root.glob("hookd/target/**/*.py"),
        *root.glob("hookd/tool/daemon/**/*.py"),
    ]
    calls = re.compile(
        r'(?:\.incident|report_incident|\.report|\bsee)\((?:\s*(?:loaded\.name|change\.name|"hookd"|target|one),)?\s*"([a-z_]+)"'
    )
    announced = {kind for path in sources for kind in calls.findall(path.read_text())}
    announced |= {hangs.HANG, hangs.OVER, stragglers.STRAGGLER, stragglers.OVER, drift.DRIFT, drift.OVER, "nan", "inf"}
    assert announced >= {"corrupt", "eval", "leak", "lost", "loss_spike", "quarantine", "training_changed"}
    known = (root / "docs" / "incidents.md").read_text()
    assert {kind for kind in announced if f"`{kind}`" not in known} == set()
