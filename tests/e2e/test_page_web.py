"""The web pages in Debian's Chromium, over a daemon with a real training process and a page of 10,000 modules."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hookd.tool.daemon.web.pages import curves
from tests.support import forked, training
from tests.support.browser import Visit, chromium
from tests.support.daemon import Daemon
from tests.support.environment import tool_environment
from tests.support.page_scene import Watched
from tests.support.processes import Process, wait_until
from tests.support.tool import hookd
from tests.support.training import Job

pytestmark = [pytest.mark.usefixtures("attachable")]

HOLDER = Path(__file__).parents[1] / "support" / "page_holder.py"
JOB = Job("named_badly.py", "--steps 0 --pause 0.04")
EVIL = '<script>document["title"]="run"</script>'
MODULES = 5_000
"""In each of two levels: 10,000 modules and their containers."""
CLICK_S = 2.0
"""The time that a click may take on a busy machine of two cores, until the new page is there; usually a tenth of it."""


class Scene(NamedTuple):
    """A daemon with two targets, and a browser."""

    daemon: Daemon
    browser: Any
    run: str
    large: str
    target: Process


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Attach to one training process, with a plugin that changes it, and hold the page of a large model."""
    mine = f"{EVIL}{os.getpid()}"
    large = f"large-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        target = stack.enter_context(training.start_warm(JOB, HOOKD_RUN=mine))
        command = [sys.executable, HOLDER, json.dumps({"run": large, "script": EVIL})]
        holder = stack.enter_context(Process(command, env=tool_environment(), stdin=True, popen=forked.start))
        holder.expect("ready")
        daemon = Daemon(tmp_path_factory.mktemp("web"), "--linger-s", "3600")  # a test ends a target
        stack.callback(daemon.process.close)
        holder.ask(json.dumps({"modules": {"count": MODULES}}), "done")
        run = attached(daemon, target)
        wait_until(lambda: daemon.rows(large), what="the large model")
        yield Scene(daemon, browser, run, large, target)


def attached(daemon: Daemon, target: Process) -> str:
    """Attach through the daemon, and return the run once there are curves to show."""
    target.expect("^step 3 ")
    plugins = [word for name in ("timing", "activations:every=2", "gradclip:max_norm=0.5") for word in ("-p", name)]
    hookd("attach", str(target.pid), *plugins, "--host", f"unix://{daemon.client.path}", "--timeout", "60")
    run: str = wait_until(
        lambda: next((row["run"] for row in daemon.client.targets() if row["pid"] == target.pid), None)
    )
    wait_until(lambda: fetch(daemon, path_of(run)).count("<polyline") >= 2, what="curves of times and losses")
    return run


@pytest.fixture
def visit(scene):
    """Return a function that opens windows; at the end, check that none had errors or requested another host."""
    opened = []

    def start(**options):
        opened.append(Visit(scene.browser, scene.daemon.url, **options))
        return opened[-1]

    yield start
    for one in opened:
        assert not one.wrong
        assert not one.strangers()
        one.close()


def path_of(run):
    return "/run/" + urllib.parse.quote(run, safe="")


def fetch(daemon, path):
    with urllib.request.urlopen(daemon.url + path, timeout=60) as answer:
        return answer.read().decode()


def test_a_reader_finds_the_way_from_the_targets_to_a_module_by_clicks(scene, visit):
    page = visit().go("/")
    row = page.locator("#targets tbody tr", has_text=str(scene.target.pid))
    assert EVIL in row.inner_text()
    assert page.title() == "Targets · hookd"
    row.locator("a").first.click()
    assert page.locator("h1").inner_text() == f"run {scene.run}"
    assert "gradclip (max_norm=0.5)" in page.get_by_role("alert").inner_text()

    # the two curves have an axis with units, and the tree has the names as they are
    figures = page.locator("figure")
    assert figures.count() == 2
    assert re.search(r"\d (m|µ)?s", figures.first.locator("svg").text_content())
    summary = page.locator("#modules summary", has_text="onerror")
    assert EVIL[:8] in summary.inner_text()
    inner = page.locator("#modules .leaf", has_text="ReLU")
    assert inner.is_visible()
    summary.click()
    assert not inner.is_visible()

    # parts that a reader has closed stay closed when the page is renewed
    with page.expect_response(re.compile("fragment=1")):
        pass
    page.locator("#live", has_text="live, ").wait_for()
    assert not inner.is_visible()

    # and the views are links
    page.get_by_role("link", name="Gradients").click()
    assert "grad norm" in page.locator("#modules .head").inner_text()
    assert page.locator('#modules [aria-current="true"]').inner_text() == "Gradients"
    page.get_by_label("Find modules by name or type").fill("relu")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"[?&]q=relu"))
    assert "view=gradients" in page.url
    assert page.locator("#modules .tree .leaf").count() == 1


def test_an_incident_is_reported_on_a_page_of_its_own(scene, visit):
    page = visit().go("/")
    row = page.locator("#incidents tbody tr", has_text="training_changed").filter(has_text=scene.run).first
    row.locator("a").first.click()
    assert "/incident/" in page.url
    assert "max_norm=0.5" in page.locator("main").inner_text()
    page.get_by_role("link", name=re.compile(r"^process \d+ of user")).click()
    assert page.locator("h1").inner_text() == f"run {scene.run}"


def test_everything_can_be_reached_by_keyboard(scene, visit):
    page = visit().go(path_of(scene.run))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    details = page.locator("#modules details").first
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert details.get_attribute("open") is not None
    page.keyboard.press("Enter")
    assert details.get_attribute("open") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(scene, visit, scheme):
    page = visit(color_scheme=scheme).go(path_of(scene.run))
    paper, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (sum(rgb(paper)) > 3 * 128) == (scheme == "light")
    assert contrast(paper, ink) >= 7
    for selector in (".soft", ".banner", ".tabs a:not([aria-current])", "th", "#modules .name b"):
        colour = page.locator(selector).first.evaluate("one => getComputedStyle(one).color")
        assert contrast(paper, colour) >= 4.5, selector


def rgb(text):
    return [int(float(one)) for one in re.findall(r"[\d.]+", text)[:3]]


def contrast(one, other):
    """Return the contrast ratio of WCAG 2.2, 1.4.3."""
    first, second = sorted((luminance(one), luminance(other)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def luminance(text):
    shares = [value / 255 for value in rgb(text)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_on_a_telephone_nothing_is_wider_than_the_screen(scene, visit):
    one = visit(viewport={"width": 400, "height": 800})
    for path in (path_of(scene.run), "/", path_of(scene.large)):
        assert one.go(path).evaluate("document.documentElement.scrollWidth") <= 400


def test_after_hours_the_charts_are_drawn_from_edge_to_edge(stack, scene, visit):
    """Five hours of steps and a gap of four minutes, in which the daemon was not scheduled."""
    watched = Watched(stack, ranks=2)
    for poll in range(9000):
        for rank in range(2):
            watched.step(rank, seconds=0.1 + (poll % 50) / 1000, loss=1 + 1 / (poll + 1))
        watched.poll()
        if poll == 8880:
            watched.now += 240
    seen, text = visit(java_script_enabled=False), watched.run()
    seen.page.route("**/run/job", lambda route: route.fulfill(body=text, content_type="text/html"))
    charts = seen.go("/run/job").locator("figure svg").all()
    assert len(charts) == 2, "times of steps, and losses"
    for chart in charts:
        plot, lines = chart.bounding_box(), [line.bounding_box() for line in chart.locator("polyline.line").all()]
        assert len(lines) == 4, "two ranks, each before and after the gap"
        scale = plot["width"] / curves.WIDTH
        right, left = plot["x"] + plot["width"] - curves.RIGHT * scale, plot["x"] + curves.LEFT * scale
        assert max(line["x"] + line["width"] for line in lines) == pytest.approx(right, abs=3)
        assert min(line["x"] for line in lines) == pytest.approx(left, abs=3)
        assert all(line["width"] > 30 for line in lines)


def test_without_javascript_the_page_works_and_is_loaded_anew(scene, visit):
    page = visit(java_script_enabled=False).go(path_of(scene.run))
    assert page.locator('meta[http-equiv="refresh"]').count() == 1
    page.get_by_role("link", name="Activations").click()
    assert "std" in page.locator("#modules .head").inner_text()
    page.get_by_label("Find modules by name or type").fill("linear")
    page.get_by_role("button", name="Find").click()
    assert page.locator("#modules .tree .leaf").count() == 3
    assert "3 modules found" in page.get_by_role("status").inner_text()


@pytest.mark.alone
def test_ten_thousand_modules_do_not_keep_a_reader_waiting(scene, visit):
    page = visit().go(path_of(scene.large))
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000
    took = clicked(page, page.locator("#modules .tree a", has_text="layers"))
    assert f"1 to 100 of {MODULES}" in page.locator(".pages").inner_text()
    took = max(took, clicked(page, page.get_by_role("link", name="next")))
    assert f"101 to 200 of {MODULES}" in page.locator(".pages").inner_text()
    begun = time.perf_counter()
    page.locator("#modules summary").nth(5).click()
    folded = time.perf_counter() - begun
    assert max(took, folded) < CLICK_S
    assert len(fetch(scene.daemon, path_of(scene.large))) < 300_000


def clicked(page, link):
    """Click; return the seconds until the new page is there."""
    begun = time.perf_counter()
    with page.expect_navigation():
        link.click()
    return time.perf_counter() - begun


def test_nothing_is_asked_of_a_page_that_is_paused_or_hidden(scene, visit):
    one = visit()
    page = one.go("/")
    with page.expect_response(re.compile("fragment=1")):
        pass
    page.get_by_role("button", name="Pause").click()
    assert page.locator("#live").inner_text().startswith("paused")
    before = len(one.requests)
    page.evaluate("look()")
    assert len(one.requests) == before
    with page.expect_response(re.compile("fragment=1")):
        page.get_by_role("button", name="Resume").click()


def test_what_is_not_there_is_a_page_with_links(scene, visit):
    one = visit()
    page = one.go("/run/nobody%2F..%3Cscript%3E")
    assert page.locator("h1").inner_text() == "Not found"
    page.get_by_role("link", name=scene.large).click()
    assert page.locator("h1").inner_text() == f"run {scene.large}"
    assert one.go("/incident/999999").locator("h1").inner_text() == "Not found"
    one.wrong = [incidents for incidents in one.wrong if "404" not in incidents]  # Chromium logs it by itself


def test_only_get_is_answered_and_every_answer_is_hardened(scene):
    for path in ("/", path_of(scene.run), "/incident/1"):
        for method in ("POST", "PUT", "DELETE"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(scene.daemon.url + path, method=method), timeout=60)
            refused.value.close()
            assert refused.value.code == 405
    text = fetch(scene.daemon, "/")
    for path in ["/", *re.findall(r'(?:href|src)="(/static/[^"]+)"', text)]:
        with urllib.request.urlopen(scene.daemon.url + path, timeout=60) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert "default-src 'none'; style-src 'self'" in answer.headers["Content-Security-Policy"]
            kept = "immutable" if path.startswith("/static/") else "no-store"
            assert kept in answer.headers["Cache-Control"]


def test_names_of_modules_run_nothing(scene, visit):
    one = visit()
    for path in ("/", path_of(scene.run), path_of(scene.run) + "?q=script", path_of(scene.large)):
        page = one.go(path)
        assert page.title().endswith("· hookd")
        assert page.locator("main script, main img").count() == 0


def test_a_target_that_is_killed_is_shown_as_such_while_somebody_looks(scene, visit):
    with training.start_warm(JOB, HOOKD_RUN=f"killed-{os.getpid()}") as target:
        page = visit().go(path_of(attached(scene.daemon, target)))
        assert page.locator("#ranks td .good").inner_text() == "running"
        target.signal(signal.SIGKILL)
        page.locator("#ranks td", has_text="lost: signal SIGKILL").wait_for()
        (alert,) = page.get_by_role("alert").all_inner_texts()
        assert "killed by SIGKILL" in alert, "and nothing changes a training that is over"
        assert page.locator("figure svg").count() == 2, "its last minutes stay"
