from __future__ import annotations

import json
import os

import pytest

from hookd.tool.cli.report import heading
from hookd.tool.cli.status import _cells, _row
from hookd.tool.reports.reading import counted
from hookd.tool.reports.report import build_report
from hookd.wire.page import EVENTS, MODULE, PHASE, STEP, PageReader, PageWriter


@pytest.fixture
def page():
    writer = PageWriter.create({"pid": os.getpid(), "step_offset": None})
    writer.set_state("running")
    yield writer
    writer.close()


def put(page, name, kind, cells, labels=None, *, buckets=()):
    labels = labels or {}
    first = page.series(page.family(name, kind, "Help.", tuple(labels), buckets), tuple(labels.values()))
    for n, cell in enumerate(cells):
        page.cells[first + n] = cell


def report(page):
    reader = PageReader(os.dup(page.fd))
    try:
        found = build_report(reader.read(), os.getpid())
    finally:
        reader.close()
    return json.loads(json.dumps(found, allow_nan=False))


def test_families_of_all_plugins_are_merged_by_module_in_the_models_order(page):
    page.module("(root)", "MLP", 1)
    page.module("fc1", "Linear", 1)
    put(page, "hookd_activations_mean", "gauge", [0.5], {"module": "fc1"})
    put(page, "hookd_timing_forward_seconds", "counter", [2.0], {"module": "fc1"})
    put(page, "hookd_timing_forward_seconds", "counter", [3.0], {"module": "(root)"})
    put(page, "hookd_nan_nonfinite", "counter", [4.0], {"module": "fc1", "where": "output", "kind": "nan"})
    root, fc1 = report(page)["modules"]
    assert root == {"name": "(root)", "type": "MLP", "root": 1, "metrics": {"timing": {"forward_seconds": 3}}}
    assert fc1["metrics"] == {
        "activations": {"mean": 0.5},
        "timing": {"forward_seconds": 2},
        "nan": {"nonfinite": [{"where": "output", "kind": "nan", "value": 4}]},
    }


def test_a_module_that_came_late_is_below_its_parent(page):
    for name in ("(root)", "a", "a.0", "#Loss.(root)", "a.1", "b", "#Loss.x", "c.d"):
        page.module(name, "Linear", 1)
    names = [row["name"] for row in report(page)["modules"]]
    assert names == ["(root)", "a", "a.0", "a.1", "b", "c.d", "#Loss.(root)", "#Loss.x"]


def test_a_module_that_only_has_series_is_there_too(page):
    put(page, "hookd_x_y", "gauge", [1.0], {"module": "gone"})
    assert report(page)["modules"] == [{"name": "gone", "type": "", "root": 0, "metrics": {"x": {"y": 1}}}]


def test_numbers_that_json_does_not_have_are_none(page):
    put(page, "hookd_x_mean", "gauge", [float("nan")], {"module": "a"})
    put(page, "hookd_x_max", "gauge", [float("inf")])
    found = report(page)
    assert found["modules"][0]["metrics"]["x"]["mean"] is None
    assert found["metrics"]["x"]["max"] is None


def test_a_histogram_is_count_sum_and_mean(page):
    put(page, "hookd_step_seconds", "histogram", [3, 1, 0, 2.0], buckets=(0.1, 1.0))
    assert report(page)["metrics"]["step"]["seconds"] == {"count": 4, "sum": 2, "mean": 0.5}


def test_steps_say_where_they_are_counted_from(page):
    put(page, "hookd_steps", "counter", [7.0])
    assert report(page)["step"]["text"] == "7 steps done since the attach"
    page.update_identity(step_offset=100)
    assert report(page)["step"] == {
        "counted": 7,
        "offset": 100,
        "current": 107,
        "is_absolute": True,
        "calls": 0,
        "micro_batches": None,
        "text": "107 steps done",
    }


def test_where_nothing_is_trained_it_is_calls_that_are_counted(page):
    put(page, "hookd_steps", "counter", [0.0])
    put(page, "hookd_step_calls", "counter", [12.0])
    step = report(page)["step"]
    assert step["text"] == "12 calls of the model, no step: nothing has been trained since the attach"
    assert counted(step) == ("calls of the model, no step", 12)
    put(page, "hookd_steps", "counter", [3.0])
    assert counted(report(page)["step"]) == ("steps since the attach", 3)


def test_plugins_overhead_and_what_is_observed(page):
    put(page, "hookd_plugin_state", "gauge", [0], {"plugin": "nan", "state": "quarantined"})
    put(page, "hookd_plugin_state", "gauge", [1], {"plugin": "nan", "state": "active"})
    put(page, "hookd_plugin_errors", "counter", [2], {"plugin": "nan"})
    put(page, "hookd_plugin_changes_training", "gauge", [0], {"plugin": "gradclip"})
    put(page, "hookd_overhead_seconds", "counter", [0.25], {"plugin": "nan"})
    put(page, "hookd_overhead_seconds", "counter", [0.05], {"plugin": "hookd"})  # no plugin
    put(page, "hookd_overhead_ratio", "gauge", [0.004])
    put(page, "hookd_modules", "gauge", [12], {"state": "observed"})
    given = {"options": {"every": "1"}, "settings": {"every": "1", "policy": "report", "no text": 5},
             "source": {"version": "1.2", "sha256": "ab"}, "error": {"text": "KeyError: 'x'"}}  # fmt: skip
    put(page, "hookd_plugin_call_seconds", "gauge", [2e-6], {"plugin": "nan"})
    put(page, "hookd_plugin_series_refused", "counter", [100], {"plugin": "nan"})
    put(page, "hookd_nan_thing", "gauge", [1.0], {"kind": "a"})
    page.update_identity(plugins={"nan": given, "gradclip": "nonsense"})
    found = report(page)
    only_looks, clips = sorted(found["plugins"], key=lambda one: one["name"], reverse=True)
    assert only_looks == {
        "name": "nan",
        "state": "active",
        "changes_training": None,
        "errors": 2,
        "interval_steps": None,
        "overhead_seconds": 0.25,
        "options": {"every": "1"},
        "settings": {"every": "1", "policy": "report"},
        "call_seconds": 2e-6,
        "series": 1,
        "refused_series": 100,
        "source": {"version": "1.2", "sha256": "ab"},
        "error": {"text": "KeyError: 'x'"},
    }
    assert (clips["name"], clips["changes_training"]) == ("gradclip", False)
    assert found["overhead"] == {"ratio": 0.004, "seconds": 0.3, "own_seconds": 0.05}
    assert found["observed"] == {"observed": 12}


def test_the_cost_is_not_known_before_the_agent_has_reckoned_it(page):
    put(page, "hookd_overhead_seconds", "counter", [0.0], {"plugin": "nan"})
    put(page, "hookd_step_seconds", "histogram", [15, 0, 2.0], buckets=(0.1,))
    found = report(page)
    assert found["overhead"]["ratio"] is None
    assert "not yet known" in "\n".join(heading({"pid": 1, **found}))
    assert found["overhead"]["seconds"] is None
    assert found["plugins"][0]["overhead_seconds"] is None, "0 would be a measurement"
    assert _cells(_row(1, found))[6] == "-"
    put(page, "hookd_overhead_ratio", "gauge", [0])
    assert report(page)["overhead"]["ratio"] == 0


def test_threads_say_where_they_are(page):
    fc1 = page.module("fc1", "Linear", 1)
    base = page.thread(7, "main")
    for cell, value in ((MODULE, fc1), (EVENTS, 9), (PHASE, 1), (STEP, 3)):
        page.cells[base + cell] = value
    expected = {"tid": 7, "name": "main", "phase": "forward", "module": "fc1", "step": 3, "events": 9}
    assert report(page)["threads"] == [expected]


def test_incidents_and_the_agents_log_are_there(page):
    page.incident({"kind": "nan", "message": "first NaN in fc1", "module": "fc1", "step": 3})
    page.log("error", "plugin x failed")
    found = report(page)
    assert found["incidents"][0]["message"] == "first NaN in fc1"
    assert found["logs"][0]["message"] == "plugin x failed"


def test_a_family_is_of_the_plugin_with_the_longest_name_that_fits(page):
    for plugin in ("grad", "grad_noise"):
        put(page, "hookd_plugin_state", "gauge", [1], {"plugin": plugin, "state": "active"})
    for name in ("hookd_grad_norm", "hookd_grad_noise_scale", "hookd_grad_noise_norm"):
        put(page, name, "gauge", [1.0])
    assert [(one["name"], one["series"]) for one in report(page)["plugins"]] == [("grad", 1), ("grad_noise", 2)]
