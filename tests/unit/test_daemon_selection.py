"""Which series are served, on a real page of this very process."""

from __future__ import annotations

import os

import pytest

from hookd.tool.daemon.metrics.selection import MAX_CORE, Limits, Selection
from hookd.wire.module_names import depth
from hookd.wire.page import PageReader, PageWriter


@pytest.fixture
def page():
    writer = PageWriter.create({"pid": os.getpid()})
    yield writer
    writer.close()


@pytest.fixture
def read(page):
    reader = PageReader(os.dup(page.fd))
    yield reader.read
    reader.close()


def put(page, name, value, module=None, kind="gauge", **labels):
    labels = labels if module is None else {"module": module, **labels}
    family = page.family(name, kind, "Help.", tuple(labels))
    page.cells[page.series(family, tuple(labels.values()))] = value


def served(selection, snapshot, now=0.0):
    return {(f.name, *f.values[k]) for f, indexes in selection.served(snapshot, now) for k in indexes}


def modules(found):
    return {key[1] for key in found}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("(root)", 0), ("fc", 1), ("blocks.0", 2), ("blocks.0.attn", 3), ("#2.(root)", 0), ("#2.fc", 1), ("#3.a.b", 2)],
)
def test_depth_is_counted_in_the_name_below_the_root(name, expected):
    assert depth(name) == expected


def test_modules_below_the_depth_limit_are_left_out_and_counted(page, read):
    for name in ("(root)", "a", "a.b", "a.b.c"):
        put(page, "hookd_x_mean", 1, name)
    selection = Selection(Limits(top_modules=0))
    assert modules(served(selection, read())) == {"(root)", "a", "a.b"}
    assert selection.dropped == 1


def test_the_costliest_modules_are_served_however_deep(page, read):
    for n in range(100):
        put(page, "hookd_timing_forward_seconds", n, f"a.b.c.{n}", kind="counter")
    assert modules(served(Selection(Limits(top_modules=3)), read())) == {"a.b.c.97", "a.b.c.98", "a.b.c.99"}


def test_a_module_with_a_finding_is_served_from_the_next_scrape_on(page, read):
    put(page, "hookd_x_mean", 1, "a.b.c.d")
    put(page, "hookd_nan_nonfinite", 0, "a.b.c.d", where="output", kind_="nan")
    selection = Selection(Limits(top_modules=0))
    assert not served(selection, read())
    put(page, "hookd_nan_nonfinite", 1, "a.b.c.d", where="output", kind_="nan")
    assert served(selection, read()) == {
        ("hookd_x_mean", "a.b.c.d"),
        ("hookd_nan_nonfinite", "a.b.c.d", "output", "nan"),
    }


def test_the_cap_holds_and_a_module_has_all_of_its_series_or_none(page, read):
    for n in range(600):
        put(page, "hookd_x_mean", 1, f"a.{n}")
        put(page, "hookd_x_std", 1, f"a.{n}")
    selection = Selection(Limits(max_series=101))
    found = served(selection, read())
    assert len(found) == 100
    assert {m for _, m in found if ("hookd_x_mean", m) in found} == {m for _, m in found if ("hookd_x_std", m) in found}
    assert selection.dropped == 1100


def test_the_default_serves_at_most_a_thousand_lines_histograms_counted_by_bucket(page, read):
    family = page.family("hookd_x_seconds", "histogram", "Help.", ("who",), (1, 2, 3))
    for n in range(500):
        page.series(family, (str(n),))
    assert len(served(Selection(Limits()), read())) == 1000 // 6


def test_core_families_are_never_dropped(page, read):
    put(page, "hookd_steps", 1, kind="counter")
    put(page, "hookd_x_mean", 1, "a")
    for n in range(20):
        put(page, "hookd_plugin_errors", 0, kind="counter", plugin=str(n))
    found = served(Selection(Limits(max_series=0)), read())
    assert len(found) == 21
    assert "hookd_x_mean" not in {name for name, *_ in found}


def test_detail_all_lifts_every_limit(page, read):
    for n in range(3000):
        put(page, "hookd_x_mean", 1, f"a.b.c.d.{n}")
    assert len(served(Selection(Limits(detail="all", max_series=1)), read())) == 3000


def test_neighbours_in_cost_do_not_take_turns_but_a_clearly_costlier_one_takes_over(page, read):
    put(page, "hookd_timing_forward_seconds", 10, "x.y.z.1", kind="counter")
    put(page, "hookd_timing_forward_seconds", 9, "x.y.z.2", kind="counter")
    selection = Selection(Limits(top_modules=1))
    assert modules(served(selection, read(), 0.0)) == {"x.y.z.1"}
    put(page, "hookd_timing_forward_seconds", 11, "x.y.z.2", kind="counter")
    assert modules(served(selection, read(), 10_000.0)) == {"x.y.z.1"}
    put(page, "hookd_timing_forward_seconds", 20, "x.y.z.2", kind="counter")
    assert modules(served(selection, read(), 20_000.0)) == {"x.y.z.2"}


def test_the_count_of_what_is_left_out_never_falls(page, read):
    for n in range(5):
        put(page, "hookd_x_mean", 1, f"a.b.c.{n}")
    selection = Selection(Limits(top_modules=0))
    served(selection, read())
    page.retire_family(page.family("hookd_x_mean", "gauge", "Help.", ("module",)))
    served(selection, read())
    assert selection.dropped == 5


def plugins(**settings):
    return {name: {"options": {}, "settings": given} for name, given in settings.items()}


@pytest.mark.parametrize("option", ["modules", "types"])
def test_modules_that_a_person_selected_are_served_however_deep_until_the_cap(page, read, option):
    for n in range(200):
        put(page, "hookd_x_mean", 1, f"a.b.c.{n}")
        put(page, "hookd_other_mean", 1, f"d.e.f.{n}")
    page.update_identity(plugins=plugins(x={option: "a*"}, other={"modules": "*", "types": "*"}))
    limits = Limits(max_series=150, top_modules=0)
    selection = Selection(limits)
    assert modules(served(selection, read())) == {f"a.b.c.{n}" for n in range(150)}
    assert selection.dropped == 250
    page.update_identity(plugins=plugins(x={option: "*"}, other={}))
    assert modules(served(selection, read())) == set()


def test_of_a_model_whose_costs_nobody_measures_the_first_modules_are_served_however_deep(page, read):
    for n in range(60):
        put(page, "hookd_x_mean", 1, f"a.b.c.{n}")
    assert len(served(Selection(Limits()), read())) == Limits().top_modules


def test_what_a_hostile_page_calls_its_plugins_does_no_harm(page, read):
    put(page, "hookd_x_mean", 1, "a.b.c.d")
    for said in (
        1,
        [],
        {"x": 1},
        {"x": {"settings": []}},
        {"x": {"settings": {"modules": 5}}},
        {"": {"settings": {"modules": "a"}}},
    ):
        page.update_identity(plugins=said)
        assert served(Selection(Limits(top_modules=0)), read()) == set()


def test_families_of_the_agent_are_bounded_too_and_what_is_left_out_is_counted(page, read):
    for number in range(MAX_CORE + 50):
        put(page, "hookd_plugin_errors", 0, kind="counter", plugin="fake", hook=f"hook_{number}")
    selection = Selection(Limits())
    assert len(served(selection, read())) == MAX_CORE
    assert selection.dropped == 50


def test_a_target_of_a_user_with_many_has_its_part_of_the_lines(page, read):
    for number in range(300):
        put(page, "hookd_x_mean", 1, f"m{number}")
        put(page, "hookd_plugin_errors", 0, kind="counter", plugin="fake", hook=f"hook_{number}")
    selection = Selection(Limits())
    snapshot = read()
    assert len(selection_of(selection, snapshot, 10_000)) == 600
    assert len(selection_of(selection, snapshot, 100)) == 100


def selection_of(selection, snapshot, most):
    return [k for _, indexes in selection.served(snapshot, 0.0, most) for k in indexes]
