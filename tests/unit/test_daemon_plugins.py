"""Daemon plugins: found, imported without torch, called in a thread of their own, quarantined and readmitted."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from array import array

import pytest

from hookd import serving
from hookd.errors import PluginError
from hookd.serving import DaemonPlugin, Metrics, Panel, Reading, hookimpl, hookspecs
from hookd.tool.config import ServeConfig
from hookd.tool.daemon.plugins import discovery, host
from hookd.tool.daemon.plugins import worker as hosted
from hookd.tool.daemon.plugins.worker import BACK_OFF_S, MAX_ERRORS, PluginWorker
from tests.support.pages import Ranks
from tests.support.processes import wait_until


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Write a daemon plugin into a directory; its modules are forgotten afterwards."""
    before = set(sys.modules)

    def make(body, name="mine", head="", file=None):
        text = f"{head}\nfrom hookd.serving import DaemonPlugin, Panel, hookimpl\n\nclass Mine(DaemonPlugin):\n    name = '{name}'\n"
        path = tmp_path / (file or f"hookd_{name}_{len(list(tmp_path.iterdir()))}.py")
        path.write_text(text + textwrap.indent(textwrap.dedent(body), "    "))
        found, problems = discovery.find((tmp_path,), lambda _: True)
        assert not problems
        return next(half for half in found if half.name == name)

    yield make
    for module in set(sys.modules) - before:
        if module.startswith("hookd_mine"):
            del sys.modules[module]


@pytest.fixture(autouse=True)
def _no_thread_stays(monkeypatch):
    """An agent of a later test would wait for them: their frames are hookd's."""
    hosted, begin = [], PluginWorker.__init__

    def begin_noted(self, *arguments, **named):
        begin(self, *arguments, **named)
        hosted.append(self)

    monkeypatch.setattr(PluginWorker, "__init__", begin_noted)
    yield
    for one in hosted:
        one._waiting.put(None)
        one._thread.join(60)
        assert not one._thread.is_alive()


@pytest.fixture
def clock():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    return Clock()


def begun(half, clock, **options):
    one = PluginWorker(half, options, clock)
    wait_until(lambda: one.state != "starting", what="its import")
    return one


def settle(one):
    wait_until(lambda: one.is_idle, what="its calls")


def test_a_half_is_found_by_reading_and_imported_when_it_is_loaded(made):
    half = made("@hookimpl\ndef incident(self, incident):\n    pass\n", head="__version__ = '1.5'")
    module = half.source.entry.partition(":")[0]
    assert module not in sys.modules
    assert (half.source.version, half.has("incident"), half.has("web_panel")) == ("1.5", True, False)
    plugin, hooks = half.load()
    assert (plugin.name, set(hooks)) == ("mine", {"incident"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only to root is a group that may write another's")
@pytest.mark.parametrize("file", ["hookd_cached.py", "hookd_cached/__init__.py"])
def test_where_others_may_plant_compiled_code_nothing_is_imported(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("from hookd.serving import DaemonPlugin\n\nclass Mine(DaemonPlugin):\n    name = 'mine'\n")
    (path.parent / "__pycache__").mkdir()
    (path.parent / "__pycache__").chmod(0o777)
    found, (problem,) = discovery.find((tmp_path,), lambda _: True)
    assert "mine" not in [half.name for half in found]
    assert "__pycache__" in problem.message


def test_torch_is_refused_with_the_authors_line(made):
    half = made("pass\n", head="\nimport torch")
    load = f"from pathlib import Path; from hookd.tool.daemon.plugins import discovery as plugins; plugins.find((Path({str(half.path.parent)!r}),), bool)[0][0].load()"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=60, check=False)
    said = done.stderr.splitlines()[-1]
    assert "the daemon never imports torch" in said
    assert said.endswith(f"({half.path}:2)")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            "daemon",
            r"No module named 'absent_library' \(.*hookd_mine_two\.py:1\); .* pip install 'hookd-two\[daemon\]'$",
        ),
        ("test", r"No module named 'absent_library' \(.*hookd_mine_two\.py:1\)$"),
    ],
)
def test_an_import_that_the_extra_brings_is_reported_with_it(tmp_path, monkeypatch, extra, said):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hookd_mine_two.py").write_text("import absent_library\n")
    info = tmp_path / "hookd_two-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hookd-two\nVersion: 1.0\nProvides-Extra: {extra}\n")
    (info / "entry_points.txt").write_text("[hookd.daemon_plugins]\ntwo = hookd_mine_two:Two\n")
    (half,), _ = discovery.find((), lambda name: name == "two")
    with pytest.raises(PluginError, match=said):
        half.load()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@hookimpl\ndef colect(self, run):\n    pass\n", r"no hook 'colect'; did you mean 'collect'\? \(.*\.py:6\)"),
        ("@hookimpl\ndef collect(self, runs):\n    pass\n", "runs"),
        ("@hookimpl\ndef collect(self, run=None):\n    pass\n", "default"),
        ("from hookd import hookimpl as theirs\n@theirs\ndef forward(self):\n    pass\n", "import hookimpl from hookd.serving"),
        ("1 / 0\n", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_with_the_authors_line(made, body, said):
    half = made(body)
    with pytest.raises(PluginError, match=said):
        half.load()


def test_all_hooks_have_a_time_and_an_example_that_is_one():
    documented = [name for name, value in vars(hookspecs).items() if hasattr(value, "hookd_daemon_spec")]
    assert set(hookspecs.TIMES_S) == set(documented) - {"register_commands"}
    assert documented
    for name in documented:
        lines = inspect.getdoc(getattr(hookspecs, name)).splitlines()
        start = next(number for number, line in enumerate(lines) if "@hookimpl" in line)
        example = textwrap.indent(textwrap.dedent("\n".join(lines[start:])), "    ")
        scope = {"hookimpl": hookimpl, "DaemonPlugin": DaemonPlugin, "Panel": Panel}
        exec(f"class Example(DaemonPlugin):\n    name = 'example'\n\n{example}", scope)
        assert set(discovery.hooks(scope["Example"]())) == {name}


def test_an_error_is_counted_and_ten_quarantine_it_until_it_comes_back_on_probation(made, clock):
    one = begun(made("@hookimpl\ndef incident(self, incident):\n    1 / incident\n"), clock)
    for _ in range(MAX_ERRORS):
        assert one.state == "active"
        one.call("incident", incident=0)
    assert (one.state, one.errors["incident"]) == ("quarantined", MAX_ERRORS)
    assert "1 / incident" in one.last_error["where"]
    one.call("incident", incident=1)
    assert one.skipped == 1
    clock.now += BACK_OFF_S - 1
    one.poll()
    assert one.state == "quarantined"
    clock.now += 1
    one.poll()
    assert one.state == "active"
    one.call("incident", incident=0)
    assert one.state == "quarantined", "one error is enough on probation"
    clock.now += BACK_OFF_S
    one.poll()
    assert one.state == "quarantined", "it stays out for twice as long"
    clock.now += BACK_OFF_S
    one.poll()
    assert one.state == "active"
    clock.now += 2 * BACK_OFF_S
    one.call("incident", incident=0)
    assert one.state == "active", "it had proved itself"


def test_one_that_says_so_stays_out(made, clock):
    one = begun(made("readmit = False\n@hookimpl\ndef incident(self, incident):\n    1 / 0\n"), clock)
    for _ in range(MAX_ERRORS):
        one.call("incident", incident=0)
    clock.now += 1e6
    one.poll()
    assert one.state == "quarantined"


def test_a_hook_that_never_returns_keeps_nobody(made, clock):
    release = threading.Event()
    one = begun(made("@hookimpl\ndef collect(self, metrics):\n    metrics.wait()\n    metrics.is_set()\n"), clock)
    kept = []
    one.ask("collect", [{"metrics": release}], lambda: kept.append(1))
    wait_until(lambda: one._under_way, what="the call")
    clock.now += hookspecs.TIMES_S["collect"]
    one.poll()
    one.poll()
    assert (one.state, one.errors["collect"]) == ("quarantined", 1)
    assert one.last_error["where"].endswith("in collect: metrics.wait()"), "the author's line, not that of threading"
    clock.now += 10 * BACK_OFF_S
    one.poll()
    assert one.state == "quarantined", "it is still inside"
    release.set()
    settle(one)
    one.poll()
    assert one.state == "active"
    assert not kept, "what comes too late is not served"


def test_configure_may_refuse_and_an_import_that_hangs_is_refused(made, clock):
    one = begun(made("@hookimpl\ndef configure(self, options):\n    self.url = options['url']\n"), clock)
    assert (one.state, one.last_error["text"]) == ("refused", "configure: KeyError: 'url'")
    release = threading.Event()
    sys.modules["hookd_mine_release"] = release
    slow = PluginWorker(
        made("pass", name="mine_slow", head="import hookd_mine_release\nhookd_mine_release.wait(600)"), {}, clock
    )
    wait_until(lambda: slow._under_way, what="its import")
    clock.now += hookspecs.TIMES_S["configure"]
    slow.poll()
    release.set()
    settle(slow)
    assert slow.state == "refused"
    assert "take longer than 10 s" in slow.last_error["text"]


def test_an_import_that_hangs_keeps_the_others_for_its_own_time_alone(made, clock, monkeypatch):
    begun, release = threading.Event(), threading.Event()
    library = types.SimpleNamespace(hang=lambda: begun.set() or release.wait(600))
    monkeypatch.setitem(sys.modules, "hookd_mine_release", library)
    slow = PluginWorker(
        made("pass", name="mine_slow", head="import hookd_mine_release\nhookd_mine_release.hang()"), {}, clock
    )
    assert begun.wait(60)
    good = PluginWorker(made("@hookimpl\ndef collect(self):\n    pass\n"), {}, clock)
    clock.now += hookspecs.TIMES_S["configure"]
    good.poll()
    assert good.state == "starting", "its time has not begun"
    slow.poll()
    assert slow.state == "refused"
    wait_until(lambda: good.state == "active", what="the next one's turn")
    good.poll()
    assert not good.errors
    assert slow.last_error["where"].endswith("in <module>: hookd_mine_release.hang()")
    release.set()
    settle(slow)
    assert not hosted._IMPORT_LOCK.locked(), "given back once"


@pytest.mark.parametrize("hook", ["__init__", "configure", "incident"])
def test_what_a_library_raises_is_reported_with_the_authors_line(made, clock, hook):
    mark = "" if hook == "__init__" else "@hookimpl\n"
    argument = {"__init__": "", "configure": ", options", "incident": ", incident"}[hook]
    one = begun(made(f"{mark}def {hook}(self{argument}):\n    json.loads('{{')\n", head="import json"), clock)
    if hook == "incident":
        one.call("incident", incident=0)
    reported = one.last_error["where"] or one.last_error["text"]
    line = 7 if hook == "__init__" else 8
    assert f"{one.available.path}:{line}" in reported
    assert "decoder.py" not in reported


def test_what_the_import_of_a_half_raises_in_a_library_is_reported_with_its_line(made):
    half = made("pass\n", head="import json; json.loads('{')")
    with pytest.raises(PluginError, match=r"JSONDecodeError.*\(.*hookd_mine_\d\.py:1\)$"):
        half.load()


def test_a_directory_that_is_on_the_path_may_be_one_of_plugins(made, monkeypatch):
    half = made("pass\n")
    monkeypatch.syspath_prepend(str(half.path.parent))
    monkeypatch.chdir(half.path.parent)
    here = discovery.AvailablePlugin(half.name, half.source, half.path.relative_to(half.path.parent))
    first, _ = here.load()
    second, _ = here.load()
    assert type(first) is type(second), "imported once"
    other = half.path.parent / "elsewhere" / half.path.name
    other.parent.mkdir()
    other.write_bytes(half.path.read_bytes())
    with pytest.raises(PluginError, match="there is a module"):
        discovery.AvailablePlugin(half.name, half.source, other).load()
    del sys.modules[half.path.stem]
    with pytest.raises(PluginError, match="there is a module"):
        discovery.AvailablePlugin(half.name, half.source, other).load()


def test_the_list_of_finders_is_replaced_and_put_back(monkeypatch):
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", mine := list(before))
    with discovery.without_torch():
        inner = discovery.without_torch()
        with inner:
            assert mine == before, "another thread may be going through it"
        with pytest.raises(ImportError, match="never imports torch"):
            importlib.import_module("torch.hookd_that_there_is_not")
    assert sys.meta_path is mine
    with discovery.without_torch():
        sys.meta_path.append(finder := object())
    assert sys.meta_path == [*before, finder], "what others add stays"


@pytest.mark.parametrize("end", ["/se cret", "/secret\n", "/secret\x7f", ":secret/", ":99999/secret"])
def test_an_address_that_is_none_is_refused_and_not_shown(end):
    with pytest.raises(PluginError) as caught:
        serving.Address(f"https://chat.example{end}")
    assert "cret" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("url", ["https://me:secret@chat.example/", "http://127.0.0.1:9/secr\u00e9t"])
def test_an_address_that_http_refuses_is_an_os_error_and_not_shown(url):
    with pytest.raises(OSError, match="cannot post to the URL") as caught:
        serving.Address(url).post({})
    assert "secr" not in "".join(traceback.format_exception(caught.value))


def test_metrics_have_the_plugins_prefix_and_bounded_labels():
    metrics = Metrics("mine", set(), [2])
    metrics.gauge("spread_seconds", "Spread.", 1.5, {"phase": "forward\nstep" + "x" * 200})
    ((values, value),) = metrics.families["hookd_mine_spread_seconds"].samples.items()
    assert (values[0][:13], len(values[0]), value) == ("forward step" + "x", serving.MAX_LABEL, 1.5)
    for labels in ({"step": "1"}, {"run": "a"}, {"Phase": "a"}, {"phase": 1.5}):
        with pytest.raises(PluginError, match="label"):
            metrics.gauge("other", "Other.", 1.0, labels)
    for name in ("Spread", "x_total", "x-y", "x_bucket"):
        with pytest.raises(PluginError, match="name of a metric"):
            metrics.gauge(name, "Other.", 1.0)
    for text in (None, "\ud800", "two\nlines"):
        with pytest.raises(PluginError, match="the help must be"):
            metrics.gauge("other", text, 1.0)
    with pytest.raises(PluginError, match="a counter must be"):
        metrics.counter("falls", "Falls.", -1.0)
    metrics.gauge("spread_seconds", "Spread.", 1.0, {"phase": "b"})
    metrics.gauge("spread_seconds", "Spread.", 2.0, {"phase": "b"})
    metrics.gauge("spread_seconds", "Spread.", 1.0, {"phase": "c"})
    assert metrics.dropped == 1, "there was room for two"


def test_labels_that_change_for_ever_are_cut_off(monkeypatch):
    monkeypatch.setattr(serving, "MAX_EVER", 3)
    ever, dropped = set(), 0
    for number in range(5):
        metrics = Metrics("mine", ever, [200])
        metrics.gauge("x", "X.", 1.0, {"what": f"text {number}"})
        dropped += metrics.dropped
    assert dropped == 2
    metrics.gauge("x", "X.", 1.0, {"what": "text 0"})
    assert len(metrics.families["hookd_mine_x"].samples) == 1, "what was there goes on"


TALLY = """
def __init__(self):
    self.seen = []

@hookimpl
def target_attached(self, target):
    self.seen.append(("attached", target.pid))

@hookimpl
def target_lost(self, target, reason):
    self.seen.append((reason, target.pid))

@hookimpl
def collect(self, run, ranks, metrics):
    metrics.gauge("ranks", "Ranks.", len(ranks))
    metrics.counter("seen", "Seen.", len(self.seen), {"what": "events"})

@hookimpl
def web_panel(self, runs):
    return Panel("<b>Ranks</b>\\n", ("run", "ranks"), [(run, len(ranks)) for run, ranks in runs.items()])
"""


def served(one):
    return {
        sample.name: (sample.labels, sample.value)
        for family in one.families(lambda *_: True)
        for sample in family.samples
    }


def test_targets_metrics_and_panels(made, stack, tmp_path, clock):
    made(TALLY)
    all_of_them = host.load(ServeConfig(plugin_dirs=(tmp_path,)), clock)
    (one,) = all_of_them.workers
    wait_until(lambda: one.state == "active", what="its import")
    ranks = Ranks(stack, 2, run="a")
    for _ in range(2):
        all_of_them.poll(ranks.targets)
        settle(one)
    ranks.targets[1].detach()
    for _ in range(2):
        all_of_them.poll(ranks.targets)
        settle(one)
    assert served(all_of_them)["hookd_mine_ranks"] == ({"run": "a"}, 1.0)
    assert served(all_of_them)["hookd_mine_seen_total"] == ({"run": "a", "what": "events"}, 3.0)
    (panel,) = all_of_them.panels()
    assert panel == {"plugin": "mine", "title": "<b>Ranks</b> ", "columns": ["run", "ranks"], "rows": [["a", 2]]}
    assert "hookd_mine_ranks" not in {f.name for f in all_of_them.families(lambda name, _: name != "hookd_mine_ranks")}
    clock.now += host.FRESH_S
    assert "hookd_mine_ranks" not in served(all_of_them), "numbers that were not set lately are not served"
    assert not all_of_them.panels()
    all_of_them.close()


def test_collect_comes_as_seldom_as_its_plugin_says_and_is_served_until_then(made, stack, tmp_path, clock):
    body = """
        @hookimpl
        def configure(self, options):
            self.every_s, self.looks = float(options["every_s"]), 0

        @hookimpl
        def collect(self, metrics):
            self.looks += 1
            metrics.counter("looks", "Looks.", self.looks)
    """
    made(textwrap.dedent(body))
    options = {"mine": {"every_s": "60"}}
    all_of_them = host.load(ServeConfig(plugin_dirs=(tmp_path,), daemon_plugin_options=options), clock)
    (one,) = all_of_them.workers
    wait_until(lambda: one.state == "active", what="its import")
    ranks = Ranks(stack, 1, run="a")
    for wait_s, looks in ((0, 1), (59, 1), (1, 2), (59, 2)):
        clock.now += wait_s
        all_of_them.poll(ranks.targets)
        settle(one)
        assert served(all_of_them)["hookd_mine_looks_total"] == ({"run": "a"}, looks)
    all_of_them.close()


def test_what_hookd_itself_refuses_is_reported_without_a_way_through_its_code(made, clock):
    one = begun(made("@hookimpl\ndef colect(self, metrics):\n    pass\n"), clock)
    assert (one.state, one.last_error["traceback"]) == ("refused", "")
    assert "did you mean 'collect'?" in one.last_error["text"]
    one = begun(made("pass", name="mine_import", head="import nowhere_at_all"), clock)
    assert "import nowhere_at_all" in one.last_error["traceback"]
    raises = "@hookimpl\ndef configure(self):\n    raise ConfigError('no url')\n"
    one = begun(made(raises, name="mine_raises", head="from hookd.errors import ConfigError"), clock)
    assert one.last_error["text"] == "no url"
    assert "raise ConfigError" in one.last_error["where"]
    assert "raise ConfigError" in one.last_error["traceback"]


def test_an_interval_that_is_no_number_refuses_the_plugin(made, clock):
    one = begun(made("every_s = 'often'\n@hookimpl\ndef collect(self, metrics):\n    pass\n"), clock)
    assert (one.state, one.errors["configure"]) == ("refused", 1)
    assert "often" in one.last_error["text"]


def test_what_is_not_allowed_is_not_imported(made, tmp_path):
    half = made("pass")
    assert not host.load(ServeConfig(plugin_dirs=(tmp_path,), plugins_allow=("other",))).workers
    assert half.source.entry.partition(":")[0] not in sys.modules


def test_a_reading_gives_series_as_metrics_names_them(stack):
    ranks = Ranks(stack, 1)
    ranks.add(0, "hookd_steps", 7)
    ranks.set(0, "hookd_mine_loss", 2.5, task="a")
    page = ranks.pages[0]
    first = page.series(page.family("hookd_step_seconds", "histogram", "Time.", (), (1.0, 2.0)))
    page.cells[first : first + 4] = array("d", [1.0, 0.0, 3.0, 3.5])
    ranks.targets[0].poll()
    reading = host._reading(ranks.targets[0])
    assert (reading.value("hookd_steps_total"), reading.value("hookd_steps"), reading.step) == (7, 7, 7)
    assert list(reading.series("hookd_mine_loss")) == [({"task": "a"}, 2.5)]
    assert reading.value("hookd_mine_loss") is None, "it has a label"
    assert reading.value("hookd_mine_loss", task="a") == 2.5
    assert (reading.value("hookd_step_seconds_sum"), reading.value("hookd_step_seconds_count")) == (3.5, 4)
    assert reading.value("hookd_step_seconds") is None


def test_a_reading_gives_all_its_numbers_and_no_histogram(stack):
    ranks = Ranks(stack, 1)
    ranks.add(0, "hookd_calls", 2.0, module="a")
    ranks.set(0, "hookd_loss", 0.5)
    page = ranks.pages[0]
    page.series(page.family("hookd_took_seconds", "histogram", "Help.", (), (0.1, 1.0)), ())
    ranks.targets[0].poll()
    reported = [(f.name, f.kind, labels, value) for f, labels, value in host._reading(ranks.targets[0]).numbers()]
    mine = [one for one in reported if one[0] in ("hookd_calls", "hookd_loss", "hookd_took_seconds")]
    assert mine == [("hookd_calls", "counter", {"module": "a"}, 2.0), ("hookd_loss", "gauge", {}, 0.5)]


def test_a_reading_of_nothing_gives_nothing():
    assert Reading("a", "0", 1, "running", None).value("hookd_steps_total") is None
