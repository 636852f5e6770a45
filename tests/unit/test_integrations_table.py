"""The table of a report that notebooks and terminals show."""

from __future__ import annotations

from hookd.integrations.table import INCIDENTS, Table, _row

MARKUP = "<script>alert(1)</script>"


def test_the_table_in_html_escapes_what_a_model_says():
    report = {
        "state": "running", "step": {"text": "step 1"}, "overhead": {"ratio": None}, "metrics": {},
        "incidents": [{"kind": "nan", "message": MARKUP}],
        "modules": [{"name": MARKUP, "type": MARKUP, "metrics": {}}],
    }  # fmt: skip
    reported = Table(report)._repr_html_()
    assert MARKUP not in reported
    assert reported.count("&lt;script&gt;") == 3


def test_a_time_that_is_not_a_number_is_not_shown():
    row = {"name": "fc", "type": "Linear", "metrics": {"timing": {"forward_calls": 2, "forward_seconds": None}}}
    assert _row(row, 1.0)[2:5] == ("2", "-", "-")


def test_of_many_incidents_the_table_shows_the_last_ones():
    report = {
        "state": "running", "step": {"text": "step 1"}, "overhead": {"ratio": None}, "metrics": {}, "modules": [],
        "incidents": [{"kind": "nan", "message": f"incident {number}"} for number in range(INCIDENTS + 2)],
    }  # fmt: skip
    shown = [line.removeprefix("! ") for line in repr(Table(report)).splitlines()[1:]]
    assert shown == [f"incident {number}" for number in range(2, INCIDENTS + 2)]
