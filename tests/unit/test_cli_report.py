"""The output of `hookd report` and `hookd status` for a report."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from hookd.errors import PageError
from hookd.tool.cli import output
from hookd.tool.cli.report import heading, incidents, modules, plugins
from hookd.tool.cli.status import _cells, _notes, _row
from hookd.tool.reports.reading import paused


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def module(name, type_="Linear", **metrics):
    return {"name": name, "type": type_, "root": 1, "metrics": metrics}


def lines(rows, limit=None):
    out = io.StringIO()
    console = Console(file=out, highlight=False, markup=False, width=160)
    for table in modules({"modules": rows}, limit):
        console.print(table)
    return [line.rstrip() for line in out.getvalue().split("\n")]


LOOKED_AT = {"activations": {"mean": 0.5, "std": 1.0, "min": -1.0, "max": 1.0}}
TIMED = {"timing": {"forward_calls": 2, "forward_seconds": 0.5}}


def test_a_name_is_whole_where_its_parent_is_not_shown_and_indented_below_what_is():
    rows = [
        module("", "MSELoss"),
        module("(root)", "Net"),
        module("layers.0", "Block"),
        module("layers.0.fc", **LOOKED_AT),
        module("layers.1.fc", **LOOKED_AT),
        module("#2.(root)", **LOOKED_AT),
        module("#2.fc", **LOOKED_AT),
    ]
    reported = lines(rows)
    at = next(n for n, line in enumerate(reported) if line.startswith("OUTPUTS OF"))
    names = [line[: reported[0].index("TYPE")].rstrip() for line in reported[2:at] if line]
    assert names == ["(loss)", "(root)", "  layers.0", "    fc", "  layers.1.fc", "#2.(root)", "  fc"]
    names = [line[:14].rstrip() for line in reported[at + 2 :] if line]
    assert names == ["layers.0.fc", "layers.1.fc", "#2.(root)", "  fc"]


def test_columns_without_a_number_are_left_out():
    bare = lines([module("(root)", "Net", **LOOKED_AT), module("fc", **LOOKED_AT)])
    assert bare[0].split() == ["MODULE", "TYPE"]
    assert next(line for line in bare if line.startswith("OUTPUTS")).split()[2:] == ["MEAN", "STD", "MIN", "MAX"]
    timed = lines([module("(root)", "Net", **TIMED)])
    assert timed[0].split() == ["MODULE", "TYPE", "CALLS", "FORWARD", "SHARE"]


def test_a_time_that_is_not_a_number_is_not_shown():
    overflown = module("(root)", "Net", timing={"forward_calls": 2, "forward_seconds": None, "backward_calls": 2})
    (row,) = [line for line in lines([overflown]) if line.startswith("(root)")]
    assert row.split() == ["(root)", "Net", "2"]


def test_a_wide_terminal_gets_one_table_with_the_same_rules(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    reported = lines([module("a.b", **LOOKED_AT, **TIMED)])
    assert reported[0].split() == ["MODULE", "TYPE", "CALLS", "FORWARD", "MEAN", "STD", "MIN", "MAX"]
    assert reported[2].startswith("a.b")


def test_what_hookd_itself_took_stands_below_its_plugins():
    def reported(**own):
        nan = {"name": "nan", "state": "active", "errors": 0, "interval_steps": 10, "overhead_seconds": 0.25}
        stream = io.StringIO()
        found = {"plugins": [nan], "overhead": {"ratio": None, "seconds": 0.3, **own}}
        Console(file=stream, width=80).print(plugins(found))
        return [line.split() for line in stream.getvalue().splitlines()]

    assert reported(own_seconds=0.05)[-1] == ["hookd", "itself", "-", "-", "-", "50", "ms"]
    assert reported(own_seconds=None)[-1][0] == "nan"
    assert reported()[-1][0] == "nan"  # in the form of an older daemon


# ---- notes for a person


def report(state="running", incidents=(), phase="forward", **target):
    return {
        "pid": 7, "identity": {"run": "r", "rank": 0}, "state": state, "incidents": list(incidents), "observed": {},
        "step": {"current": 3, "is_absolute": True, "text": "step 3"}, "plugins": [], "metrics": {}, "modules": [],
        "overhead": {"ratio": None, "seconds": 0.0}, "threads": [{"phase": "other"}, {"phase": phase}],
        **({"target": served(**target)} if target else {}),
    }  # fmt: skip


def served(**more):
    return {"run": "r", "rank": "0", "state": "attached", "reason": None, "how": None, "hang": None, "ongoing": {},
            "incidents": 0, "series_dropped": 0, "user": "alice", **more}  # fmt: skip


def incident(kind, message):
    return {"seq": 1, "time": 1_700_000_000.5, "kind": kind, "message": message}


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_status_shows_the_first_nan_whatever_came_before_and_after(kind):
    reported = [
        incident("dead", "dead first"),
        incident(kind, "first bad"),
        incident(kind, "second"),
        incident("dead", "x"),
    ]
    (note,) = _notes([_row(7, report(incidents=reported))])
    assert note.endswith("  first bad (and 3 more: hookd report 7)")


def test_without_a_nan_status_shows_the_newest_incident():
    reported = [incident("dead", "one"), incident("leak", "two")]
    (note,) = _notes([_row(7, report(incidents=reported))])
    assert note.endswith("  two (and 1 more: hookd report 7)")


def test_status_says_when_an_incident_was_reported_which_may_be_over():
    found = report(incidents=[incident("quarantine", "mine is quarantined")])
    (note,) = _notes([_row(7, found)])
    assert re.fullmatch(r"7: 2023-11-1\d \d\d:\d\d:20  mine is quarantined", note)


def test_a_paused_target_is_called_so_and_how_it_goes_on_is_said():
    why = incident(
        "paused", "nan: the training is paused; it goes on after `hookd plugin config PID nan policy=report`"
    )
    found = report(incidents=[incident("nan", "first NaN"), why], phase="paused", state="running", pid=7)
    row = _row(7, found)
    assert row["state"] == "paused"
    how = "nan: the training is paused; it goes on after `hookd plugin config 7 nan policy=report`"
    assert f"7: {how}" in list(_notes([row]))
    reported = list(heading(found))
    assert any(line.startswith("paused, step 3") for line in reported)
    assert how in reported


def test_a_reason_that_is_the_state_is_said_once():
    found = report(state="detached", reason="detached")
    (line,) = [line for line in heading(found) if "detached" in line]
    assert line.startswith("detached, step 3")


def test_of_several_pauses_the_last_is_reported():
    found = report(incidents=[incident("paused", "the first"), incident("paused", "the second")], phase="paused")
    assert paused(found) == "the second"
    again = incident("paused", "the first, again") | {
        "last": 1_700_000_009.5
    }  # equal incidents are at the first's place
    assert paused(report(incidents=[again, incident("paused", "the second")], phase="paused")) == "the first, again"


def test_one_that_goes_on_or_has_ended_is_not_paused():
    assert _row(7, report(incidents=[incident("paused", "x")]))["state"] == "running"
    assert _row(7, report(phase="paused", state="exited"))["state"] == "exited"
    assert _row(7, report(phase="paused", state="running") | {"target": served(state="lost")})["state"] == "lost"


def test_what_is_not_on_metrics_is_reported_with_the_setting_that_changes_it():
    found = report(series_dropped=312)
    for reported in (list(_notes([_row(7, found)])), list(heading(found))):
        assert [line for line in reported if "312 series" in line and "HOOKD_DETAIL=all" in line]
    assert not list(_notes([_row(7, report(series_dropped=0))]))


def test_a_plugin_whose_labels_have_no_end_is_named():
    found = {**report(), "plugins": [{"name": "talks", "refused_series": 1234}, {"name": "old"}]}
    (note,) = _notes([_row(7, found)])
    assert note.startswith("7: talks: 1,234 series were refused")


def test_what_the_daemon_has_reported_and_is_not_over_is_shown_but_for_a_hang_which_has_words_of_its_own():
    message = "rank 1 needs 1.6 times the other ranks' time in data"
    reported = {"straggler": {"time": 0.0, "message": message}, "hang": {"time": 0.0, "message": "silent"}}
    found = report() | {"target": served(ongoing=reported, incidents=2)}
    for lines in (list(_notes([_row(7, found)])), list(heading(found))):
        (line,) = (line for line in lines if message in line)
        assert "straggler since 19" in line
        assert not any("silent" in line for line in lines)


@pytest.mark.parametrize(
    ("role", "waits_for", "words"),
    [
        ("stands", [], "hangs in forward of fc for at least 31 s"),
        ("waits", ["1", "3"], "waits in forward of fc for rank 1, 3, for at least 31 s"),
    ],
)
def test_in_a_hang_the_rank_that_others_wait_for_is_told_apart(role, waits_for, words):
    hang = {"role": role, "waits_for": waits_for, "where": "in forward of fc", "for_s": 31.0, "at_least": True,
            "message": "m"}  # fmt: skip
    found = report() | {"target": served(hang=hang)}
    row = _row(7, found)
    assert row["state"] == _cells(row)[3] == words.split()[0]
    assert f"7: {words}" in list(_notes([row]))
    assert words in list(heading(found))


def test_what_a_step_mostly_waits_for_is_said():
    def lines(**seconds):
        rows = [{"phase": phase, "value": value} for phase, value in seconds.items()]
        ratios = [
            {"phase": "forward", "value": 1.0},
            {"phase": "other", "value": 0.1},
            {"phase": "backward", "value": 1.0},
        ]
        metrics = {"timing": {"phase_seconds": rows}, "collectives": {"phase_ratio": ratios}}
        return [
            line for line in heading({**report(), "metrics": metrics}) if "of a step" in line or "a step is" in line
        ]

    assert lines(data=6.8, forward=3.2, collectives=0.0) == [
        "a step is 68 % data, 32 % forward; ranks wait for each other in the forward as well",
        "the input is the bottleneck: 68 % of a step waits for a DataLoader; give it more workers",
    ]
    assert lines(forward=4.0, other=6.0)[1:] == [
        "60 % of a step is code between the model, the backward, the optimizer and the DataLoader; `hookd stack 7`, a few times, shows where"
    ]
    assert lines(data=1.0, forward=4.0, collectives=5.0)[1:] == [
        "50 % of a step waits for other ranks; `hookd incidents` names a rank that is slow"
    ]


def test_a_report_says_how_it_learns_and_which_of_several_losses_is_shown():
    rates = [{"optimizer": "AdamW", "group": str(n), "value": 0.5**n} for n in range(6)]
    losses = [{"backward": str(n), "value": 0.25} for n in range(4)]
    of = {"learning": {"rate": rates}, "activations": {"loss": losses, "total_grad_norm": 1.25}}
    lines = list(heading({**report(), "metrics": of, "step_seconds": 0.02}))
    assert any("loss 0.25 in the first of 4 or more backwards, 20 ms a step" in line for line in lines)
    assert "learning rate 1, 0.5, 0.25, 0.125, …, gradient norm 1.25 (at the last sampled step)" in lines
    of = {"activations": {"loss": losses[:1]}}
    (line,) = [line for line in heading({**report(), "metrics": of}) if "loss" in line]
    assert "loss 0.25, " in line


@pytest.mark.parametrize("width", range(40, 60))
def test_a_number_stays_on_one_line_with_its_unit(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = output.wrap(
        "running, 1087 steps done, 21.3 ms a step, of which hookd takes 1.8 %; 3 times, 7 MiB"
    ).splitlines()
    assert len(lines) > 1
    assert all(any(number in line for line in lines) for number in ("21.3 ms", "1.8 %", "3 times", "7 MiB"))


def test_nothing_that_a_target_says_is_obeyed_by_the_terminal(capsys):
    evil = "\x1b[2J\x9b31m\r\x07evil"
    output.say(output.wrap(evil))
    output.say(evil)
    output.show(output.fill(output.table("A"), [[evil]]))
    reported = capsys.readouterr()
    for text in (reported.out, reported.err):
        assert "evil" in text
        assert not [one for one in text if not (one.isprintable() or one == "\n")]


@pytest.mark.parametrize("nonsense", ["x", None, 1e300, [1], {"a": 1}])
def test_a_target_that_says_nonsense_of_itself_has_a_report(nonsense):
    identity = dict.fromkeys(("world_size", "attached", "script", "run", "rank", "method"), nonsense)
    found = report(incidents=[{"kind": "nan", "time": nonsense}])
    assert "process 7" in next(iter(heading({**found, "pid": 7, "identity": identity})))
    assert len(list(incidents(found))) == 2


def test_one_page_that_was_never_good_does_not_keep_status_from_the_others():
    row = _row(
        7, PageError("the page of process 7 cannot be trusted", reason="protocol", hint="The process continues.")
    )
    assert (row["reason"], _cells(row)[3]) == ("protocol", "protocol")
    assert list(_notes([row])) == ["7: the page of process 7 cannot be trusted (The process continues.)"]
