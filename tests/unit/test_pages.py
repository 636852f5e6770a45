"""The web pages: made from real pages of this process; whatever a target says in them is text."""

from __future__ import annotations

import html.parser
import math
import re
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from hookd.tool.daemon.fleet.history import EVERY_S, History, steps_per_second
from hookd.tool.daemon.web.pages import assets, curves, frame, home, incident, parts, run
from hookd.tool.daemon.web.pages.heat import ColourScale
from hookd.tool.daemon.web.pages.html import Markup, address, tag
from hookd.tool.daemon.web.pages.modules import MOST, PAGE
from hookd.tool.daemon.web.pages.routes import Pages
from hookd.tool.daemon.web.pages.run import Choice
from hookd.tool.daemon.web.pages.tree import Tree, parent
from tests.support.calls import calls_counted
from tests.support.page_scene import Watched
from tests.support.pages import new_fleet

EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'</title></style>&amp;\x1b[31m\u202e"
VOID = {"br", "input", "link", "meta"}


class Checked(html.parser.HTMLParser):
    """Reads a page as a browser does, and fails at unclosed elements and at anything that our policy forbids."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.links, self.classes, self.seen = [], "", [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert tag not in {"img", "iframe", "object", "base", "style", "embed"}
        assert not [name for name in found if name.startswith("on") or name == "style"]
        if tag == "script":
            assert found["src"] == assets.path(assets.SCRIPT)
        if "href" in found:
            assert found["href"][0] in "/#" or found["href"].startswith("data:image/svg+xml,"), found["href"]
            self.links.append(found["href"])
        self.seen.append(tag)
        self.classes += (found.get("class") or "").split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def row(**more):
    detail = {"calls_before": [{"module": EVIL, "min": 1.0}], EVIL: {EVIL: [EVIL]}}
    return {"id": 3, "pid": 7, "start": 1, "run": EVIL, "rank": EVIL, "kind": EVIL, "module": EVIL, "step": 5,
            "time": 5.0, "message": EVIL, "user": EVIL, "count": 2, "last": 6.0, "detail": detail, **more}  # fmt: skip


class Scene(Watched):
    def home(self, incidents=()):
        return frame.page("Targets", home.parts(self.targets, self.history, incidents, {EVIL: EVIL}))


@pytest.fixture
def scene(stack):
    return Scene(stack)


def named(page, count, pattern="layers.{}.mlp", kind="Linear"):
    for n in range(count):
        page.module(pattern.format(n), kind, 1)


def test_elements_escape_what_is_put_into_them():
    made = tag("a", EVIL, tag("b", 1), None, href=EVIL, disabled=True, hidden=False)
    assert isinstance(made, Markup)
    found = Checked(f"<p>{tag('p', EVIL, title=EVIL)}</p>")
    assert "<script>alert(1)</script>" in found.words
    assert re.fullmatch(r'<a href="[^"<>]*" disabled>[^<>]*<b>1</b></a>', made)


def test_an_address_keeps_names_apart_from_its_own_parts():
    where = urlsplit(address("run", "a/../b?c#d", at="modules", m="x&y=z", p=None))
    assert where.path == "/run/a%2F..%2Fb%3Fc%23d"
    assert parse_qs(where.query) == {"m": ["x&y=z"]}
    assert where.fragment == "modules"


def test_whatever_a_target_says_is_text_on_every_page(stack):
    scene = Scene(stack, ranks=2, name=EVIL)
    page = scene.ranks.pages[0]
    page.update_identity(
        script=EVIL, python=EVIL, torch=EVIL, method=EVIL, plugins={"p" + EVIL: {"options": {EVIL: EVIL}}}
    )
    for name in ("(root)", EVIL, f"{EVIL}.{EVIL}", f"#2.{EVIL}"):
        page.module(name[:200], EVIL[:60], 1)
        scene.ranks.set(0, "hookd_activations_std", 2.0, module=name)
        scene.ranks.set(0, "hookd_activations_finding", 1.0, module=name, kind=EVIL)
    scene.ranks.set(0, "hookd_plugin_state", 1.0, plugin="p" + EVIL, state="active")
    scene.ranks.set(0, "hookd_plugin_changes_training", 1.0, plugin="p" + EVIL)
    scene.ranks.set(0, "hookd_timing_phase_seconds", 1.0, phase=EVIL)
    scene.ranks.set(0, "hookd_modules", 1.0, state=EVIL)
    scene.targets[0].hang = {"where": EVIL, "message": EVIL, "waits_for": [EVIL], "at_least": False, "for_s": 3.0}
    for _ in range(4):
        scene.step(0, loss=1.0)
        scene.poll()
    pages = [
        scene.home([row()]),
        *(scene.run([row()], view=view, q=q, m=m) for view in ("time", "activations", "gradients", EVIL)
          for q, m in (("", ""), ("script", ""), (EVIL, ""), ("", EVIL))),
        frame.page(EVIL, incident.parts(row(), is_watched=True, now=1000.0)),
        frame.page(EVIL, incident.missing(EVIL, [EVIL])),
    ]  # fmt: skip
    for page in pages:
        found = Checked(page)
        assert "<script>alert(1)</script>" in found.words
        assert not {"\x1b", "\u202e"} & set(page)


def test_tables_of_the_daemons_plugins_are_on_the_home_page_as_text(stack):
    scene = Scene(stack)
    panel = {"plugin": "spread", "title": EVIL, "columns": [EVIL, ">x"], "rows": [[EVIL, 0.5], ["b", None]]}
    page = frame.page("Targets", home.parts(scene.targets, scene.history, (), {}, [panel]))
    assert Checked(page).words.count("<script>alert(1)</script>") >= 3
    assert '<td class="n">0.5</td>' in page
    assert '<td class="n">-</td>' in page


def test_the_policy_allows_our_own_files_and_nothing_else():
    policy = dict(part.strip().partition(" ")[::2] for part in frame.POLICY.split(";"))
    assert policy.pop("img-src") == "'self' data:"
    assert policy == {
        "default-src": "'none'", "style-src": "'self'", "script-src": "'self'", "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'self'", "frame-ancestors": "'none'",
    }  # fmt: skip


def test_the_name_of_a_file_changes_with_its_content():
    assert re.fullmatch(r"/static/page\.[0-9a-f]{16}\.css", assets.path(assets.STYLE))
    assert assets.path(assets.STYLE) != assets.path(assets.SCRIPT)


def test_the_home_page_has_each_target_with_what_is_wrong_with_it(stack):
    scene = Scene(stack, ranks=3)
    for _ in range(3):
        for rank in range(3):
            scene.step(rank, seconds=0.25)
        scene.poll()
    scene.ranks.set(0, "hookd_overhead_ratio", 0.0123)
    scene.targets[0].read()
    scene.targets[1].hang = {
        "where": "in forward of fc",
        "message": "m",
        "waits_for": [],
        "at_least": False,
        "for_s": 9.0,
    }
    scene.targets[2].mark_corrupt()
    words = Checked(scene.home()).words
    assert "3 targets of 1 run" in words
    assert "250 ms" in words
    assert "1.2 %" in words
    assert "hangs in forward of fc" in words
    assert "corrupt" in words
    assert "None yet" in Checked(frame.page("x", home.parts([], scene.history, [], {}))).words


def test_ranks_are_compared_and_the_slow_one_is_marked(stack):
    scene = Scene(stack, ranks=4)
    for _ in range(3):
        for rank in range(4):
            scene.step(rank, seconds=0.3 if rank == 2 else 0.1)
        scene.poll()
    page = scene.run()
    assert '<span class="bad">3.00x</span>' in page
    assert page.count('<span class="bad">') == 1
    assert {"rank 0", "rank 3"} <= set(re.findall(r"<title>(rank \d)</title>", page))


def test_a_page_that_cannot_be_trusted_is_said_to_be_so_and_shows_nothing_of_it(scene):
    named(scene.ranks.pages[0], 3)
    scene.poll()
    assert "layers" in scene.run()
    scene.targets[0].mark_corrupt()
    page = scene.run()
    assert "cannot be trusted" in page
    assert "layers" not in page


def test_of_a_run_that_is_gone_its_incidents_are_left(scene):
    parts = run.parts("old", [], scene.history, [row(kind="lost")], Choice())
    words = Checked(frame.page("x", parts)).words
    assert "None of its ranks is watched any more" in words
    assert "lost" in words


def test_a_list_of_incidents_says_whose_each_is(scene):
    alice, bob = row(run="job", user="alice"), row(run="job", user="bob")
    for made in (
        scene.home,
        lambda rows: frame.page("x", run.parts("old", [], scene.history, rows, Choice())),
    ):
        of_one, of_two = (made(rows).partition('id="incidents"')[2] for rows in ([alice, alice], [alice, bob]))
        assert ">user</th>" in of_two
        assert ">alice</td>" in of_two
        assert ">bob</td>" in of_two
        assert ">user</th>" in of_one
        assert ">alice</td>" in of_one


def test_the_page_of_an_incident_says_whose_it_is(scene):
    words = Checked(frame.page("x", incident.parts(row(user="alice"), is_watched=False, now=1000.0))).words
    assert "process 7 of user alice" in words


def test_the_page_of_an_incident_tells_what_where_since_when_and_what_to_do(scene):
    steps = [{"step": n, "loss": 2.0 + n % 3, "largest_gradient": None} for n in range(784, 792)]
    ranks = [
        {"rank": "1", "place": 8, "is_mute": False, "issued": {"0-1": 2916.0}, "ended": None, "time": 1790000000.5}
    ]
    detail = {"is_step_absolute": False, "plugin": "nan", "steps_before": steps, "ranks": ranks, "is_exact": True}
    made = row(kind="nan", run="job", module="net.3", step=1792, time=400.0, count=3, last=500.0, detail=detail)
    page = frame.page("x", incident.parts(made, is_watched=True, now=1000.0))
    words = Checked(page).words
    for told in ("10m00s ago", "3 times", "1,792 (counted from the attach)", "Loss of the steps before", "step 784: 3",
                 "hookd plugin enable 7 capture", f"hookd report '#{made['id']}'", "0-1: 2,916", "2026-09-21"):  # fmt: skip
        assert told in words, told
    assert "/run/job?pid=7&amp;q=net.3#modules" in page
    assert not re.search(r"True|False|None|[{}]|e\+09|Largest gradient|place", words)


@pytest.mark.parametrize(
    "steps",
    [[], None, "x", [1, 2], [{"step": "a", "loss": 1.0}] * 5, [{"step": n, "loss": math.nan} for n in range(5)]],
    ids=str,
)
def test_steps_before_an_incident_that_cannot_be_drawn_are_not(steps):
    made = row(kind="nan", detail={"steps_before": steps})
    assert "of the steps before" not in Checked(frame.page("x", incident.parts(made, is_watched=False, now=0.0))).words


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_page_of_a_run_has_the_incidents_of_its_user_alone_and_of_all_once_it_is_gone(stack, scene, is_watched):
    fleet = new_fleet(stack)
    for pid, owner in ((11, 1), (12, 2)):
        incident = {"seq": 1, "time": 5.0, "kind": "nan", "message": f"first NaN of {pid}"}
        fleet.store.add((pid, 1, 1), "job", "0", [incident], owner=owner)
    scene.targets[0].claim.uid = 2
    fleet.targets = lambda: scene.targets if is_watched else []
    service = SimpleNamespace(fleet=fleet, history=scene.history, fingerprints=None)
    words = "".join(Pages(service, None)._make_run("job", Choice()).parts)
    assert "first NaN of 12" in words
    assert ("first NaN of 11" in words) is not is_watched


def test_a_banner_tells_that_the_training_is_changed_only_while_it_is(scene):
    scene.ranks.set(0, "hookd_plugin_changes_training", 1.0, plugin="gradclip")
    scene.ranks.set(0, "hookd_plugin_state", 1.0, plugin="gradclip", state="active")
    scene.ranks.pages[0].update_identity(plugins={"gradclip": {"options": {"max_norm": "1.0"}}})
    scene.poll()
    assert "This training is being changed" in scene.run()
    assert "gradclip (max_norm=1.0)" in Checked(scene.run()).words
    assert "changes the training" in scene.home()
    scene.ranks.set(0, "hookd_plugin_changes_training", 0.0, plugin="gradclip")
    scene.poll()
    assert "being changed" not in scene.run()
    scene.ranks.set(0, "hookd_plugin_changes_training", 1.0, plugin="gradclip")
    scene.ranks.set(0, "hookd_plugin_state", 0.0, plugin="gradclip", state="active")
    scene.poll()
    assert "being changed" not in scene.run(), "one that is quarantined changes nothing"


# ---- the module tree


@pytest.mark.parametrize(
    ("name", "above", "label"),
    [
        ("(root)", None, "(root)"), ("#2.(root)", None, "#2.(root)"), ("fc", "(root)", "fc"), ("a.b.0", "a.b", "0"),
        ("#2.fc", "#2.(root)", "fc"), ("#2.a.b", "#2.a", "b"), (".", "(root)", "."), ("#x", None, "#x"),
    ],
)  # fmt: skip
def test_a_name_says_where_a_module_is(name, above, label):
    assert parent(name) == (above, label)


def test_names_of_a_thousand_levels_cost_no_more_than_they_are_worth(scene):
    """A target chooses its names: with a node for each level, a page of names would be gigabytes."""
    named(scene.ranks.pages[0], 100, "{}" + ".x" * 500)
    named(scene.ranks.pages[0], 1, "." * 1000)
    assert len(Tree(scene.targets[0].read()).nodes) < 101 * 70
    assert scene.run()


def test_sizes_of_all_magnitudes_have_their_warmth():
    colour_scale = ColourScale("size", 5e-324, 1.7e308)
    assert (colour_scale.of(5e-324), colour_scale.of(1.7e308), colour_scale.of(math.inf)) == ("h1", "h9", "bad")


def test_containers_that_nobody_called_are_in_the_tree_too(scene):
    named(scene.ranks.pages[0], 2, "blocks.{}.mlp.fc")
    scene.ranks.set(0, "hookd_activations_std", 1.0, module="head")
    tree = Tree(scene.targets[0].read())
    (root,) = tree.roots
    assert [one.name for one in root.children] == ["blocks", "head"]
    assert [one.name for one in tree.path(tree.nodes["blocks.1.mlp.fc"])] == [
        "(root)",
        "blocks",
        "blocks.1",
        "blocks.1.mlp",
    ]


def test_a_view_shows_its_numbers_as_warm_as_they_are(scene):
    page = scene.ranks.pages[0]
    named(page, 3, "fc{}")
    for n, value in enumerate((1e-4, 1e-2, 1.0)):
        scene.ranks.set(0, "hookd_activations_grad_norm", value, module=f"fc{n}")
        scene.ranks.set(0, "hookd_activations_mean", -value, module=f"fc{n}")
    scene.ranks.set(0, "hookd_activations_grad_norm", math.nan, module="fc9")
    scene.poll()
    gradients = scene.run(view="gradients")
    cells = dict(re.findall(r'class="cell (h\d|bad)" title="grad norm">([^<]*)<', gradients))
    assert cells == {"h1": "0.0001", "h5": "0.01", "h9": "1", "bad": "nan"}
    assert 'aria-label="grad norm from the first module to the last"' in gradients
    assert re.search(r'class="cell h9 below" title="mean">-1<', scene.run(view="activations"))


def test_time_is_a_share_of_all_and_own_time_of_the_same_whole(scene):
    for module, seconds, own in (("(root)", 4.0, 1.0), ("fc", 3.0, 3.0)):
        scene.ranks.add(0, "hookd_timing_forward_seconds", seconds, module=module)
        scene.ranks.add(0, "hookd_timing_forward_self_seconds", own, module=module)
        scene.ranks.add(0, "hookd_timing_forward_calls", 10.0, module=module)
    scene.poll()
    cells = re.findall(r'title="(share|own|forward)">([^<]*)<', scene.run())
    assert cells == [("share", "100 %"), ("own", "25 %"), ("forward", "400 ms"),
                     ("share", "75 %"), ("own", "75 %"), ("forward", "300 ms")]  # fmt: skip


def shown(page):
    return re.findall(r'<span class="name" title="([^"]*)">', page)


def test_a_large_model_is_shown_a_part_at_a_time_and_every_module_can_be_reached(scene):
    named(scene.ranks.pages[0], 2_000, "model.layers.{}.mlp.fc")
    scene.poll()
    tree = Tree(scene.targets[0].read())
    assert len(tree.nodes) == 1 + 2 + 3 * 2_000
    with calls_counted() as made:
        page = scene.run()
    assert made[0] < 50 * len(tree.nodes), "who looks waits"
    assert len(page) < 100_000
    assert len(shown(page)) <= MOST
    pages = [scene.run(m="model.layers", p=str(n + 1)) for n in range(2_000 // PAGE)]
    every = [name for page in pages for name in shown(page)]
    assert {f"model.layers.{n}.mlp.fc" for n in range(2_000)} | {f"model.layers.{n}" for n in range(2_000)} <= set(
        every
    )
    assert len(every) == len(set(every))
    assert "1901 to 2000 of 2000" in pages[-1]
    assert 'rel="next"' not in pages[-1]
    assert 'href="/run/job?m=model.layers#modules"' in scene.run(), "what is not shown is linked"


def test_a_search_finds_names_and_types_and_is_paged(scene):
    named(scene.ranks.pages[0], 250, "model.layers.{}.mlp", "Linear")
    named(scene.ranks.pages[0], 1, "model.norm{}", "LayerNorm")
    scene.poll()
    assert shown(scene.run(q="NORM0")) == ["model.norm0"]
    assert shown(scene.run(q="layernorm")) == ["model.norm0"]
    first, last = scene.run(q="linear"), scene.run(q="linear", p="3")
    assert "250 modules found" in first
    assert (len(shown(first)), len(shown(last))) == (100, 50)
    assert not shown(scene.run(q="nothing of the kind"))
    assert "no such module" in scene.run(m="gone")


@pytest.mark.parametrize(
    "query",
    [
        {"p": "0"},
        {"p": "999999999999"},
        {"p": "-1"},
        {"p": "٣"},
        {"pid": "x"},
        {"pid": "1"},
        {"view": "nothing"},
        {"m": "\0"},
    ],
)
def test_a_query_that_makes_no_sense_is_as_if_it_were_not_there(scene, query):
    named(scene.ranks.pages[0], 3)
    scene.poll()
    Checked(scene.run(**query))


# ---- the last minutes


@pytest.mark.parametrize("hours", [2, -2, 10 * 8760])
def test_a_clock_that_is_set_does_not_change_how_fast_things_go(stack, hours):
    scene, wall = Scene(stack), SimpleNamespace(ahead_s=0.0)
    scene.history = History(lambda: scene.now, lambda: 1e9 + scene.now + wall.ahead_s)
    for _ in range(30):
        scene.step(0)
        scene.poll()
    samples = scene.history.of(scene.targets[0])
    before = steps_per_second(samples)
    wall.ahead_s = hours * 3600.0
    scene.step(0)
    scene.poll()
    after = scene.history.of(scene.targets[0])
    assert steps_per_second(after) == pytest.approx(before, rel=0.1)
    assert after[0].time - samples[0].time == pytest.approx(hours * 3600.0), "a picture has no gap"


def test_the_history_is_bounded_and_knows_how_fast_things_go(scene):
    for n in range(500):
        scene.step(seconds=0.5, loss=float(n))
        scene.poll()
    samples = scene.history.of(scene.targets[0])
    assert len(samples) == 450
    assert samples[-1].losses[0] == 499.0
    kept = scene.history._kept[scene.targets[0]]
    assert len(kept) * kept.itemsize == 450 * 64
    assert re.search(r'<td class="n">0\.5</td><td class="n">500 ms</td>', scene.run()), "steps a second, and their time"
    scene.now += EVERY_S
    scene.history.poll([])
    assert scene.history.of(scene.targets[0]) == []


def test_a_loss_that_is_no_number_is_marked(scene):
    for loss in (1.0, 2.0, math.nan, 3.0, math.inf, 1.0):
        scene.step(loss=loss)
        scene.poll()
    assert scene.run().count('class="notfinite"') == 2


def test_what_does_not_change_and_what_jumps_can_be_drawn(scene):
    for loss in (0.0, 0.0, -3.0, 1e30, 5e-324, 1e-12, 1.7e308, -1.7e308):
        for _ in range(2):
            scene.step(seconds=loss or 1.0, loss=loss)
            scene.poll()
            assert "nan" not in re.sub(r"<title>.*?</title>", "", Checked(scene.run()) and scene.run())


@pytest.mark.parametrize(
    ("values", "low", "top"),
    [
        ([1.0, 1.0], 0.95, 1.05), ([2.3, 2.2], 2.0, 2.5), ([0.1, 4.0], 0.0, 4.0), ([-3.0, -2.0], -3.0, -2.0),
        ([-1.0, 1.0], -1.0, 1.0), ([0.0, 0.0], 0.0, 1.0), ([1.0] * 99 + [1000.0], 0.0, 4.0),
    ],
)  # fmt: skip
def test_an_axis_has_room_for_what_matters(values, low, top):
    frame = curves._Frame([curves.Line("x", 0, list(enumerate(values)))], len(values), is_from_zero=False)
    assert (frame.low, frame.top) == pytest.approx((low, top))


def test_a_line_of_fifteen_minutes_is_drawn_to_its_end():
    """A long list of points is not text that is truncated."""
    points = [(1000.0 + n * EVERY_S, 0.1 + n % 7) for n in range(450)]
    drawn = curves.chart("x", [curves.Line("rank 0", 0, points)], str, now=points[-1][0])
    (line,) = re.findall(r'points="([^"]*)"', drawn)
    assert len(line.split()) == 450


def xs(points):
    return [float(pair.split(",")[0]) for pair in points.split()]


def test_the_time_axis_ends_now_and_what_did_not_come_is_a_gap():
    points = [(when, 0.1) for n in range(10) for when in (1000.0 + 2 * n, 1060.0 + 2 * n)]
    drawn = curves.chart("x", [curves.Line("rank 0", 0, sorted(points))], str, now=1120.0)
    before, after = map(xs, re.findall(r'points="([^"]*)"', drawn))
    right = curves.WIDTH - curves.RIGHT
    ends = [curves.LEFT + share * (right - curves.LEFT) for share in (0, 18 / 120, 60 / 120, 78 / 120)]
    assert [before[0], before[-1], after[0], after[-1]] == pytest.approx(ends, abs=0.1)


def test_a_chart_tells_values_and_incidents_where_they_were():
    lines = [curves.Line(f"rank {n}", n, [(1000.0 + at, at + n / 10) for at in range(0, 100, 10)]) for n in range(2)]
    marks = [curves.Mark(1050.0, "nan in head, rank 1 (#7)"), curves.Mark(10.0, "long ago")]
    drawn = curves.chart("x", lines, str, now=1100.0, marks=marks)
    titles = re.findall(r"<title>([^<]*)</title>", drawn)
    assert "50s ago: nan in head, rank 1 (#7)" in titles
    assert not [title for title in titles if "long ago" in title]
    assert any(title.endswith("ago\nrank 0: 50.0\nrank 1: 50.1") for title in titles), titles


@pytest.mark.parametrize(("silent_s", "is_drawn"), [(8, False), (40, True)])
def test_a_step_that_hangs_grows_in_the_chart_of_step_times(scene, silent_s, is_drawn):
    for n in range(5):
        scene.step(loss=float(n))
        scene.poll()
    for _ in range(silent_s // int(EVERY_S)):
        scene.poll()
    page = scene.run()
    assert ('class="line unfinished c0"' in page) == is_drawn
    of_losses = page.partition('aria-label="Loss')[2]
    ends_at = xs(re.search(r'points="([^"]*)"', of_losses)[1])[-1]
    assert ends_at == pytest.approx(curves.WIDTH - curves.RIGHT - silent_s / (silent_s + 8) * 492, abs=1.0)
    assert (f"rank 0: a step that is not over after {silent_s} s" in page) == is_drawn
    scene.targets[0].lose()
    assert 'class="line unfinished c0"' not in scene.run()


def test_an_incident_is_marked_where_it_happened_whichever_way_its_step_was_counted():
    steps = (
        {"step": 105, "is_step_absolute": True},
        {"step": 6, "is_step_absolute": False},
        {"step": 107},
        {"step": None},
    )
    report = {"step": {"offset": 100, "is_absolute": True}, "incidents": [{"kind": "nan", **step} for step in steps]}
    assert [event.step for event in parts.events(report)] == [5, 6, 7]
