"""`hookd report '#ID'`: its text for an incident's detail."""

import io
import json
import math
import time

from rich.console import Console

from hookd.tool.cli import run_report

MOMENT = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1)) + 0.25


def test_the_headings_of_a_run_fit_80_columns_with_rows_as_they_are():
    out = io.StringIO()
    rank = {
        "target": {"rank": "12", "state": "attached", "hang": None}, "pid": 4194304, "state": "running", "threads": [],
        "identity": {"rank": "12"}, "step": {"current": 180204}, "overhead": {"ratio": 0.0123},
        "metrics": {"step": {"seconds": {"mean": 0.197}}, "timing": {"phase_seconds": [
            {"phase": "forward", "value": 3.0}, {"phase": "data", "value": 1.0}]}},
        "incidents": [{}] * 12,
    }  # fmt: skip
    slow = {**rank, "metrics": {**rank["metrics"], "step": {"seconds": {"mean": 0.4}}}}
    Console(file=out, width=80).print(run_report.ranks([rank, rank, slow]))
    head, _, *rows = out.getvalue().splitlines()
    assert "INC" in head
    assert len(rows) == 3, "each rank is one line"
    assert "2.03x slow" in rows[-1]


def lines(**detail):
    row = {"id": 7, "kind": "hang", "time": MOMENT, "run": "r", "rank": "0", "pid": 4, "message": "m", "detail": detail}
    return list(run_report.incident(row))[3:]


def test_an_event_is_reported_with_the_time_of_day_and_without_what_says_nothing():
    reported = lines(events=[{"event": "call", "time": MOMENT, "step": 0, "module": None, "mute": False}])
    assert reported == ["events:", "  event call, time 03:04:05.250, step 0, mute no"]


def test_a_rank_with_its_collectives_is_reported_in_words_and_no_number_of_ours():
    reported = lines(place=[1, 2], ranks=[{"rank": "1", "for_s": 6.026206493, "issued": {"0-1": 242.0}}])
    assert reported == ["ranks:", "  rank 1, for_s 6.02621, issued (0-1 242)"]


def test_a_time_that_is_none_and_what_is_nested_deeper_are_shown_all_the_same():
    deep = {"a": {"b": {"c": 1}}}
    assert lines(one={"time": math.nan}, deep=deep) == ["one: time -", f"deep: {json.dumps(deep)}"]
