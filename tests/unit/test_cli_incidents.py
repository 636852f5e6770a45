"""`hookd incidents` and `hookd report RUN`, where several users have had runs of one name."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hookd.errors import NoSuchTarget, PageError, UsageError
from hookd.tool.cli import subject
from hookd.tool.cli.incidents import incidents
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.linux.owner import uid_named, user_name

ROOT, STRANGER = 0, 4_000_000_001


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Store incidents of runs: `kept({run: {pid: owner}})`. No daemon answers, and no process is a target."""
    monkeypatch.setenv("HOOKD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr("hookd.tool.cli.targets.daemon", lambda *_: None)
    monkeypatch.setattr("hookd.tool.cli.targets.foregrounds", list)
    monkeypatch.setattr("hookd.tool.cli.targets.attached", list)

    def keep(runs):
        store = IncidentStore.open(tmp_path)
        for run, owners in runs.items():
            for pid, owner in owners.items():
                incident = {"seq": 1, "time": 1000.0 + pid, "kind": "nan", "message": f"first NaN of {pid}"}
                store.add((pid, 100 + pid, 1), run, "0", [incident], owner=owner)
        store.close()

    return keep


def listed(*words):
    """Return the lines of `hookd incidents`, and its output on stderr."""
    done = CliRunner().invoke(incidents, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines(), done.stderr


def targets_of(lines):
    """Return the part of each line below the heading that names the target."""
    return [re.search(r"\S+ \(.*?\)", line)[0] for line in lines[1:]]


def test_of_one_user_too_each_line_says_whose_it_is(kept):
    kept({"llama": {11: ROOT, 12: ROOT}})
    lines, _ = listed()
    assert targets_of(lines) == ["llama/0 (11 of root)", "llama/0 (12 of root)"]


def test_of_several_users_each_line_says_whose_it_is(kept):
    kept({"llama": {11: ROOT, 12: STRANGER, 13: -1}})
    lines, _ = listed("--run", "llama")
    assert targets_of(lines) == [
        "llama/0 (11 of root)", f"llama/0 (12 of {STRANGER})", "llama/0 (13)",
    ]  # fmt: skip
    rows = json.loads("\n".join(listed("--json")[0]))["incidents"]
    assert [row["user"] for row in rows] == ["root", str(STRANGER), ""]


def test_the_columns_have_headings_and_stand_below_each_other(kept, tmp_path):
    kept({"llama": {11: ROOT}, "a_run_with_a_name": {12: STRANGER}})
    store = IncidentStore.open(tmp_path)
    store.add(
        (13, 1, 1), "b", "0", [{"seq": 1, "time": 2000.0, "kind": "memory_growth_over", "message": "over"}], owner=0
    )
    store.close()
    heading, *lines = listed()[0]
    at = heading.index("WHAT")
    assert heading.split() == ["ID", "TIME", "KIND", "RUN/RANK", "(PROCESS)", "WHAT"]
    assert [line[at:] for line in lines] == ["first NaN of 11", "first NaN of 12", "over"]


@pytest.mark.parametrize("user", ["root", "0"])
def test_the_incidents_of_one_user_can_be_asked_for_by_name_and_number(kept, user):
    kept({"llama": {11: ROOT, 12: STRANGER}, "bert": {13: STRANGER}})
    lines, _ = listed("--user", user)
    assert targets_of(lines) == ["llama/0 (11 of root)"]


def test_a_user_that_there_is_not_is_refused():
    with pytest.raises(UsageError, match="there is no user 'nobody of that name'") as caught:
        uid_named("nobody of that name")
    assert caught.value.reason == "no-such-user"
    with pytest.raises(UsageError):
        uid_named("-1")
    assert uid_named(str(STRANGER)) == STRANGER


@pytest.mark.parametrize("has_daemon", [True, False])
def test_while_a_run_is_watched_it_means_that_of_its_user(kept, monkeypatch, has_daemon):
    kept({"llama": {11: ROOT, 12: STRANGER}})
    row = {"pid": 11, "start_ticks": 111, "run": "llama", "rank": "0", "uid": ROOT, "user": "root"}
    younger = {**row, "pid": 12, "start_ticks": 112, "uid": STRANGER, "user": str(STRANGER)}
    if has_daemon:
        monkeypatch.setattr("hookd.tool.cli.targets.servers", lambda _: [{"targets": [younger, row]}])
        monkeypatch.setattr("hookd.tool.cli.stored.rows", asked_of_file(monkeypatch))
        monkeypatch.setattr("hookd.tool.cli.targets.daemon", lambda *_: SimpleNamespace())
    else:
        reports = [(one["pid"], {"pid": one["pid"], "identity": {}, "target": one}) for one in (younger, row)]
        monkeypatch.setattr("hookd.tool.cli.targets.reports", lambda *_, **__: iter(reports))
    lines, said = listed("--run", "llama")
    assert targets_of(lines) == ["llama/0 (11 of root)"]
    assert f"these are incidents of user root; {STRANGER} had a run llama too" in said
    lines, said = listed("--run", "llama", "--user", str(STRANGER))
    assert targets_of(lines) == [f"llama/0 (12 of {STRANGER})"]
    assert not said


def asked_of_file(monkeypatch):
    """Return `stored.rows` as it is without a daemon."""
    from hookd.tool.cli import stored

    plain = stored.rows
    return lambda _, *more, **wanted: plain(None, *more, **wanted)


def test_a_report_of_a_run_that_several_users_have_had_is_refused_with_their_names(kept):
    kept({"llama": {11: ROOT, 12: STRANGER, 13: -1}, "bert": {14: ROOT, 15: -1}, "old": {16: -1}})
    with pytest.raises(UsageError, match=f"several users have had a run 'llama', .*: {STRANGER}, root") as caught:
        subject.find("llama", None)
    assert (caught.value.reason, caught.value.exit_code) == ("several-users", 2)
    assert f"hookd report llama --user {STRANGER}" in caught.value.hint
    assert [row["pid"] for row in subject.find("llama", None, ROOT).rows] == [11]
    assert [row["pid"] for row in subject.find("llama", None, STRANGER).rows] == [12]
    with pytest.raises(NoSuchTarget, match="no run 'bert' of user"):
        subject.find("bert", None, STRANGER)
    assert subject.find("#1", None, ROOT).rows[0]["pid"] == 11
    with pytest.raises(NoSuchTarget, match="incident #1 belongs to user root"):
        subject.find("#1", None, STRANGER)
    assert [row["pid"] for row in subject.find("bert", None).rows] == [14]
    assert subject.find("bert", None).whose == " of user root"
    assert [row["pid"] for row in subject.find("old", None).rows] == [16]
    assert subject.find("old", None).whose == ""
    with pytest.raises(NoSuchTarget):
        subject.find("gpt", None)


def test_a_number_that_is_a_run_of_several_users_is_refused_in_the_same_way(kept):
    number = str(2**22 + 1)  # no pid
    kept({number: {11: ROOT, 12: STRANGER}})
    with pytest.raises(UsageError, match="several users"):
        subject.find(number, None)
    with pytest.raises(NoSuchTarget, match="process"):
        subject.find(str(2**22 + 2), None)


def test_a_report_takes_the_ranks_and_incidents_of_its_own_user_for_its_run(kept, monkeypatch):
    kept({"llama": {11: STRANGER, 12: ROOT, 13: ROOT}})
    reports = {
        pid: {
            "pid": pid, "identity": {"world_size": 2}, "incidents": [],
            "target": {"run": "llama", "rank": str(pid), "start_ticks": 100 + pid, "uid": uid,
                       "user": user_name(uid)},
        }
        for pid, uid in ((11, STRANGER), (12, ROOT), (13, ROOT))
    }  # fmt: skip
    for pid, one in reports.items():
        one["incidents"] = [{"seq": 1, "time": 1000.0 + pid, "kind": "nan", "message": f"first NaN of {pid}"}]
    monkeypatch.setattr("hookd.tool.cli.targets.reports", lambda *_, **__: iter(reports.items()))
    monkeypatch.setattr("hookd.tool.cli.targets.report", lambda pid, *_, **__: reports[pid])
    found = subject.find("12", None)
    assert [one["pid"] for one in found.reports[0]["elsewhere"]] == [13]
    assert {one["pid"] for one in subject.find("llama", None).reports} == {11}
    assert [row["pid"] for row in subject.find("llama", None).rows] == [11]
    assert {one["pid"] for one in subject.find("llama", None, ROOT).reports} == {12, 13}
    assert [row["pid"] for row in subject.find("llama", None, ROOT).rows] == [12, 13]
    with pytest.raises(NoSuchTarget, match="target 12 belongs to user root"):
        subject.find("12", None, STRANGER)


def test_status_shows_the_targets_of_one_user(monkeypatch):
    from hookd.tool.cli.status import status

    found = [(pid, PageError("broken", reason="corrupt")) for pid in (11, 12)]
    monkeypatch.setattr("hookd.tool.cli.targets.reader", lambda *_: None)
    monkeypatch.setattr("hookd.tool.cli.targets.foregrounds", list)
    monkeypatch.setattr("hookd.tool.cli.targets.reports", lambda *_: iter(found))
    monkeypatch.setattr("hookd.tool.linux.accounts.uid_of", lambda pid: {11: ROOT, 12: STRANGER}[pid])
    done = CliRunner().invoke(status, ["--json", "--user", str(STRANGER)], catch_exceptions=False)
    assert [row["pid"] for row in json.loads(done.stdout)["targets"]] == [12]
    done = CliRunner().invoke(status, ["--user", "4000000009"], catch_exceptions=False)
    assert "no process of user 4000000009 is attached" in done.stderr


def test_a_list_to_follow_says_whose_each_line_is(capsys):
    from hookd.tool.cli.incidents import show

    rows = [
        {"id": n, "time": 5.0, "run": "llama", "rank": "0", "pid": n, "kind": "nan", "message": "m", "user": user}
        for n, user in enumerate(("alice", "mallory", "alice"))
    ]
    for row in rows:
        show([row], as_json=False)
    assert targets_of(["", *capsys.readouterr().out.splitlines()]) == [
        "llama/0 (0 of alice)", "llama/0 (1 of mallory)", "llama/0 (2 of alice)",
    ]  # fmt: skip


def test_one_incident_says_whose_it_is(kept):
    from hookd.tool.cli import run_report
    from hookd.tool.cli.html.document import document

    kept({"llama": {11: STRANGER}})
    found = subject.find("#1", None)
    assert f"run llama, rank 0, process 11 of user {STRANGER}" in list(run_report.incident(found.rows[0]))
    assert f"process 11 of user {STRANGER}" in document(found)
    assert f"ranks of this run of user {STRANGER}" in document(subject.find("llama", None))


def test_an_incident_that_comes_while_the_list_is_read_is_followed(kept, monkeypatch):
    from hookd.tool.cli import stored

    plain, followed = stored.rows, []

    def read(*arguments, **wanted):
        found = plain(*arguments, **wanted)
        if "limit" in wanted:  # the list
            kept({"llama": {13: ROOT}})
        return found

    kept({"bert": {11: ROOT}})
    monkeypatch.setattr("hookd.tool.cli.stored.rows", read)
    monkeypatch.setattr(
        "hookd.tool.cli.incidents._follow",
        lambda _host, _place, after, chosen, **_: followed.extend(plain(None, after=after, **vars(chosen))),
    )
    lines, _ = listed("--follow", "--run", "llama")
    assert (lines, [row["pid"] for row in followed]) == ([], [13])
