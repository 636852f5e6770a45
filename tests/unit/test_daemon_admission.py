"""The part of a flood that the store accepts: so many rows, so many kinds, and one line on the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hookd.tool.daemon.incidents import admission, kinds
from hookd.tool.daemon.incidents.admission import LIMITS, LOG_S, SUM_UP_S, Admission, Source
from hookd.tool.daemon.incidents.kinds import Kinds
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.linux.owner import user_name
from hookd.wire import labels


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def store():
    opened = IncidentStore.open(None)
    yield opened
    opened.close()


@pytest.fixture
def admit(store, clock):
    return Admission(store, lambda: clock.now)


def source(pid=1, run="r", rank="0", owner=7):
    return Source((pid, 1, 1), labels.Claim(pid, pid, rank, run, run), owner)


def word(n):
    return "".join(chr(ord("a") + int(digit)) for digit in str(n))


def reported(count, begin=1, **more):
    return [{"seq": n, "kind": "nan", "message": f"in {word(n)}", **more} for n in range(begin, begin + count)]


def dropped(store):
    return [(row["message"], row["owner"]) for row in store.query(kind="dropped")]


def test_of_equal_incidents_the_first_is_new_and_the_others_are_counted_without_limit(admit, store):
    burst = LIMITS["target"].burst
    equal = [{"seq": n, "time": 100.0 + n, "kind": "nan", "message": f"loss {n}.5 at step {n}"} for n in range(1, 5000)]
    new, lost = admit.add(source(), equal[: burst * 2])
    assert ([one["seq"] for one in new], lost) == ([1], 0)
    assert admit.add(source(), equal[burst * 2 :]) == ([], 0)
    (row,) = store.query()
    assert (row["count"], row["time"], row["last"], row["message"]) == (4999, 101.0, 5099.0, "loss 1.5 at step 1")


def test_what_a_target_tells_beyond_its_limit_is_dropped_and_one_incident_and_line_says_so(admit, store, clock, caplog):
    burst = LIMITS["target"].burst
    new, lost = admit.add(source(), reported(burst + 50))
    assert (len(new), lost) == (burst, 50)
    admit.sum_up()
    said = f"50 more incidents of run r, rank 0 (process 1 of user {user_name(7)}) were dropped in 1 s"
    assert dropped(store) == [(said, 7)]
    assert caplog.messages == [said]
    number = store.query(kind="dropped")[0]["seq"]
    admit.add(source(), reported(20, begin=1000))
    admit.sum_up()
    assert dropped(store) == [(said, 7)], "not before a while has passed"
    clock.now += SUM_UP_S
    admit.sum_up()
    (row,) = store.query(kind="dropped")
    assert row["message"].startswith("70 more incidents of run r, rank 0")
    assert row["seq"] == number
    assert len(caplog.messages) == 1
    clock.now += LOG_S
    admit.sum_up()
    assert len(caplog.messages) == 2
    assert len(store.query()) == burst + 1


def test_room_comes_back_with_time(admit, clock):
    limit = LIMITS["target"]
    admit.add(source(), reported(limit.burst))
    assert admit.add(source(), reported(1, begin=1000))[1] == 1
    clock.now += 3 / limit.per_s
    assert admit.add(source(), reported(5, begin=2000))[1] == 2


def test_targets_of_one_run_and_runs_of_one_user_have_a_limit_together_and_another_user_is_not_concerned(admit, store):
    for pid in range(1, 21):
        admit.add(source(pid), reported(100))
    assert len(store.query(run="r")) == LIMITS["run"].burst
    for pid in range(100, 200):
        admit.add(source(pid, run=f"r{pid}"), reported(100))
    assert len(admit._losses) <= 2, "what says so does not grow with targets and runs"
    admit.sum_up()
    assert sorted(row["message"].partition(" were")[0].split(" ", 1)[1] for row in store.query(kind="dropped")) == [
        f"more incidents of run r of user {user_name(7)}",
        f"more incidents of user {user_name(7)}",
    ]
    new, lost = admit.add(source(999, run="victim", owner=8), reported(1))
    assert (len(new), lost) == (1, 0)


def test_the_daemon_itself_is_heard_where_a_target_has_used_its_room_and_has_a_limit_of_its_own(admit, store):
    admit.add(source(), reported(10_000))
    assert admit.add_own(source(), {"kind": "lost", "message": "died", "seq": -1})
    assert [row["kind"] for row in store.query(kind="lost")] == ["lost"]
    answers = [admit.add_own(source(pid), {"kind": "lost", "message": "died", "seq": -1}) for pid in range(2, 1000)]
    assert answers.count(True) == LIMITS["run"].burst - 1
    assert set(answers) == {True, None}


def test_what_a_page_had_no_room_for_is_reported_and_costs_the_room_of_a_row(admit, store, caplog):
    for pid in range(1, 5000):
        admit.missed(source(pid, run=f"r{pid}"), 10**18)
    assert len(admit._losses) <= LIMITS["user"].burst + 1
    admit.sum_up()
    assert len(store.query()) == 1000
    assert f"{admission.MOST_COUNTED:,} more incidents" in "".join(row["message"] for row in store.query())
    assert len(caplog.messages) == admission.LINES + 1


def test_at_the_end_it_is_written_how_many_were_dropped(admit, store):
    admit.add(source(), reported(LIMITS["target"].burst + 1))
    admit.sum_up()
    admit.add(source(), reported(1, begin=5000))
    admit.sum_up(is_last=True)
    assert dropped(store)[0][0].startswith("2 more")


def test_what_is_over_is_forgotten(admit, clock):
    admit.add(source(), reported(1000))
    admit.sum_up()
    clock.now += 1000
    admit.sum_up()
    assert (admit._losses, admit._buckets) == ({}, {})


def test_ever_new_kinds_are_one_kind_and_keep_their_word(admit, store):
    admit.add(source(), [{"seq": n, "kind": f"kind {word(n)}", "message": "x"} for n in range(1, 101)])
    rows = store.query()
    assert len({row["kind"] for row in rows}) == kinds.MOST_OF_TARGET + 1
    assert f"kind {word(100)}: x" in {row["message"] for row in rows if row["kind"] == "other"}


def test_kinds_are_bounded_by_target_and_user_and_in_all_and_hookds_own_always_pass():
    known = Kinds()

    def given(owner, pid, count):
        return {known.bounded(owner, (pid, 1, 1), f"o{owner}p{pid}n{n}") for n in range(count)} - {"other"}

    assert len(given(1, 1, 40_000)) == kinds.MOST_OF_TARGET
    assert sum(len(given(1, pid, 100)) for pid in range(2, 50)) == kinds.MOST_OF_OWNER - kinds.MOST_OF_TARGET
    assert len(given(2, 99, 10)) == 10
    assert sum(len(given(owner, owner, 100)) for owner in range(100, 1000)) <= kinds.MOST
    assert known.bounded(5000, (5000, 1, 1), "nan") == "nan"
    assert known.bounded(5000, (5000, 1, 1), "mine") == "other"
    assert known.bounded(2, (99, 1, 1), "o2p99n3") == "o2p99n3", "what was given stays"
    known.keep([(99, 1, 1)])
    assert set(known._of_target) == {(99, 1, 1)}
    assert known.bounded(5000, (5000, 1, 1), "mine") == "mine", "users that are gone hold no room"


@pytest.mark.parametrize("kind", ["", "x" * 65, "a\nb"])
def test_what_is_not_a_word_is_another_kind(kind):
    assert Kinds().bounded(1, (1, 1, 1), kind) == "other"
