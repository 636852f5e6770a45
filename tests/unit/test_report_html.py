"""The HTML report: self-contained, without script, and whatever a target says in it is text."""

from __future__ import annotations

import html.parser
import os

import pytest

from hookd.tool.cli.html import document
from hookd.tool.cli.subject import Subject
from hookd.tool.daemon.fleet import curve
from hookd.tool.daemon.web.pages import plots
from hookd.tool.reports.report import build_report
from hookd.wire.page import PageReader, PageWriter

EVIL = '</title></style><script>alert(1)</script><img src=x onerror="a">\'\x1b[31m\u202e&amp;'
VOID = {"meta"}


class Checked(html.parser.HTMLParser):
    """Reads a page, and fails at anything that runs, loads, or is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.seen, self.words = [], [], ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in {"script", "img", "link", "iframe", "object", "a", "base", "form"}
        assert not [name for name, _ in attrs if name.startswith("on") or name in {"src", "href"}]
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture
def report():
    writer = PageWriter.create({
        "pid": os.getpid(), "step_offset": None, "script": EVIL, "run": EVIL, "rank": EVIL, "python": EVIL, "torch": 3,
        "world_size": 2, "started": 1.0, "attached": 2.0, "method": EVIL,
    })  # fmt: skip
    writer.set_state("running")
    writer.module("fc." + EVIL[:40], EVIL[:40], 1)
    for phase, seconds in (("forward", 3.0), (EVIL, 1.0)):
        family = writer.family("hookd_timing_phase_seconds", "counter", "x", ("phase",), ())
        writer.cells[writer.series(family, (phase,))] = seconds
    details = {"calls_before": [{"module": EVIL, "min": 1.0}], "nested": {EVIL: [{EVIL: [EVIL]}]}, EVIL: EVIL}
    writer.incident({"kind": EVIL, "message": EVIL, "module": EVIL, "step": 5, "python_stack": [EVIL] * 9, **details})
    for step in range(1, 1001):
        writer.record(curve.STEP_RECORD, 0, step, 10.0 if step == 500 else 0.02)
    reader = PageReader(os.dup(writer.fd))
    yield {**build_report(reader.read(), 7), "curve": curve.of(reader.records())}
    reader.close()
    writer.close()


def row(report, **more):
    (detail,) = report["incidents"]
    return {"id": 3, "pid": 7, "start": 1, "run": EVIL, "rank": EVIL, "kind": EVIL, "module": EVIL, "step": 5, "time": 5.0,
            "message": EVIL, "detail": detail, **more}  # fmt: skip


@pytest.mark.parametrize("kind", ["target", "run", "incident"])
def test_what_a_target_says_is_text_on_every_page_and_nothing_is_loaded(report, kind):
    page = document.document(Subject(kind, EVIL, [report, report], [row(report)]))
    checked = Checked(page)
    assert {"svg", "polyline", "table", "details"} <= set(checked.seen)
    assert "<script>alert(1)</script>" in checked.words
    assert checked.policy.startswith("default-src 'none'")
    assert not {"\x1b", "\u202e"} & set(page)
    assert "://" not in page


def test_a_run_that_is_gone_makes_a_page_too(report):
    gone = Checked(document.document(Subject("run", "r", [], [row(report)])))
    assert "None of the ranks of this run is watched any more" in gone.words


def test_a_curve_has_few_points_and_keeps_the_longest_step(report):
    points = report["curve"]
    assert len(points) <= curve.POINTS
    assert max(point["longest"] for point in points) == 10.0
    assert {point["seconds"] for point in points} == {0.02}
    assert points[-1]["step"] == 1000


def test_a_step_that_is_far_longer_is_cut_off_and_said(report):
    assert plots.cut_off(report["curve"]) == (1, 10.0)
    drawn = plots.step_times([plots.Curve("x", 0, report["curve"])])
    assert "up to 10 s" in drawn
    assert ">20 ms<" in drawn, "the others are not pressed to the floor"
    assert "Too few" in plots.step_times([plots.Curve("x", 0, report["curve"][:1])])


@pytest.mark.parametrize(
    ("first", "last", "seconds"), [(1, 2, 1e-7), (1, 1, 0.5), (5, 10**9, 3.0), (1, 70_000, 1234.5)]
)
def test_every_curve_has_an_axis(first, last, seconds):
    points = [{"step": step, "seconds": seconds, "longest": seconds} for step in (first, last)]
    drawn = Checked(plots.step_times([plots.Curve("x", 0, points)]))
    assert 8 <= drawn.seen.count("text") <= 25 or last - first < 5
