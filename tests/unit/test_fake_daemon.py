"""The daemon of `hookd.testing`: an author's daemon plugin in the test's process, run by what runs it in a daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import threading

import click
import pytest

from hookd.errors import PluginError
from hookd.serving import DaemonPlugin, Panel, hookimpl, hookspecs
from hookd.testing import FakeDaemon, rehearsal
from hookd.tool.daemon.plugins import discovery
from tests.support.environment import REPOSITORY

DOCS = REPOSITORY / "docs"


class Spread(DaemonPlugin):
    """Uses every hook that there is."""

    name = "spread"

    def __init__(self):
        self.seen = []

    @hookimpl
    def configure(self, options):
        self.unit = options.get("unit", "steps")

    @hookimpl
    def target_attached(self, target):
        self.seen.append(("attached", target.run, target.rank))

    @hookimpl
    def target_lost(self, target, reason):
        self.seen.append((reason, target.run, target.rank))

    @hookimpl
    def collect(self, run, ranks, metrics):
        steps = [rank.value("hookd_steps_total") or 0 for rank in ranks]
        metrics.gauge(self.unit, "Steps between the first and the last rank.", max(steps) - min(steps))
        metrics.counter("ends", "Ends that were seen.", sum(what != "attached" for what, *_ in self.seen))

    @hookimpl
    def incident(self, incident):
        self.seen.append((incident["kind"], incident["run"], incident["rank"]))
        if incident["message"] == "boom":
            raise ValueError(incident["message"])

    @hookimpl
    def web_panel(self, runs):
        return Panel("Ranks", ("run", "ranks"), [(run, len(ranks)) for run, ranks in runs.items()])

    @hookimpl
    def register_commands(self):
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def spread(as_json):
            if not as_json:
                raise PluginError("give --json")
            click.echo(json.dumps(self.seen))

        return [spread]

    @hookimpl
    def close(self):
        self.seen.append("closed")


def test_ranks_come_step_and_end_in_every_real_way(fake_daemon):
    fake_daemon.start(Spread)
    first, second, third, _ = ranks = fake_daemon.ranks(4, run="llama")
    for number, rank in enumerate(ranks):
        rank.run_steps(number + 1)
    fake_daemon.look()
    fake_daemon.assert_metrics(
        {
            'hookd_spread_steps{run="llama"}': 3,
            'hookd_steps_total{run="llama",rank="3"}': 4,
            'hookd_target_up{rank="3"}': 1,
        }
    )
    assert fake_daemon.panel["rows"] == [["llama", 4]]

    first.end()
    second.kill()
    third.detach()
    fake_daemon.look()
    fake_daemon.look()
    plugin = fake_daemon.plugin("spread")
    assert plugin.seen[:4] == [("attached", "llama", str(rank)) for rank in range(4)]
    ends = {("exited", "llama", "0"), ("signal SIGKILL", "llama", "1"), ("detached", "llama", "2")}
    assert set(plugin.seen[4:]) == ends | {("lost", "llama", "1")}, "how it ended is an incident of the daemon's own"
    assert fake_daemon.value("hookd_spread_ends_total", run="llama") == 4
    assert fake_daemon.panel["rows"] == [["llama", 1]]
    fake_daemon.close()
    assert plugin.seen[-1] == "closed"


def test_ranks_are_numbered_in_each_run_by_themselves(fake_daemon):
    fake_daemon.start(Spread)
    ranks = [*fake_daemon.ranks(2, run="a"), *fake_daemon.ranks(1, run="b"), *fake_daemon.ranks(1, run="a")]
    assert [(rank.run, rank.rank) for rank in ranks] == [("a", "0"), ("a", "1"), ("b", "0"), ("a", "2")]


def test_incidents_come_as_the_store_gives_them(fake_daemon):
    fake_daemon.start(Spread)
    (rank,) = fake_daemon.ranks(run="a")
    fake_daemon.look()  # it is attached: that and what the store gives come in two ways
    rank.incident("nan", "the loss is NaN", module="head", step=7)
    fake_daemon.look()
    fake_daemon.incident("hang", "stands still", run="b", rank="3")
    assert fake_daemon.plugin("spread").seen[1:] == [("nan", "a", "0"), ("hang", "b", "3")]
    nan, hang = fake_daemon.incidents
    assert (nan.pid, nan.module, nan.step, nan.id) == (rank.pid, "head", 7, 1)
    assert (hang.kind, hang.id, hang.run, hang.rank) == ("hang", 2, "b", "3")


def test_a_command_runs_as_if_it_was_typed(fake_daemon):
    fake_daemon.start(Spread)
    assert fake_daemon.invoke("spread", "--json").output == "[]\n", "in an object of its own, as in a command"
    assert "--json" in fake_daemon.invoke("spread", "--help").output
    with pytest.raises(PluginError, match="give --json"):
        fake_daemon.invoke("spread")
    with pytest.raises(KeyError):
        fake_daemon.invoke("spraed")


def test_what_a_hook_raises_fails_the_test_with_the_traceback():
    with FakeDaemon() as daemon:
        daemon.start(Spread)
        daemon.incident("nan", "boom")
        assert daemon.errors == {("spread", "incident"): 1}
        assert daemon.state("spread") == "active"
        with pytest.raises(AssertionError) as caught:
            daemon.stop_clean()
    assert "ValueError: boom" in str(caught.value)
    assert 'raise ValueError(incident["message"])' in str(caught.value)


def test_a_hook_that_takes_too_long_fails_the_test_where_it_stands(monkeypatch):
    release = threading.Event()

    class Waiting(DaemonPlugin):
        name = "waiting"

        @hookimpl
        def collect(self):
            release.wait(600)

    monkeypatch.setitem(hookspecs.TIMES_S, "collect", 0.1)
    with FakeDaemon() as daemon:
        daemon.start(Waiting)
        daemon.ranks()
        daemon.look()
        assert daemon.state("waiting") == "quarantined"
        release.set()
        with pytest.raises(AssertionError, match="collect takes longer than"):
            daemon.stop_clean()


LATE = """
import sys
from hookd.serving import DaemonPlugin, hookimpl

class Late(DaemonPlugin):
    name = "late"

    @hookimpl
    def collect(self):
        sys.modules["hookd_late_release"].wait(600)
"""


def test_a_rehearsal_has_the_authors_line_of_what_takes_too_long(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hookd_late_release", release := threading.Event())
    monkeypatch.setitem(hookspecs.TIMES_S, "collect", 0.05)
    monkeypatch.setattr("hookd.testing.daemon.JOIN_S", 0.0)
    (file := tmp_path / "hookd_late.py").write_text(LATE)
    (half,), _ = discovery.find((tmp_path,), lambda name: name == "late")
    try:
        (raised,) = rehearsal.rehearse(half, {}, str(tmp_path))["raised"]
    finally:
        release.set()
        sys.modules.pop("hookd_late", None)
    assert (raised["hook"], raised["file"], raised["line"]) == ("collect", str(file), 10)


def test_what_is_refused_is_raised_with_the_authors_line(fake_daemon):
    class Wrong(DaemonPlugin):
        name = "wrong"

        @hookimpl
        def colect(self, run): ...

    with pytest.raises(PluginError, match=rf"wrong: there is no hook 'colect'; did you mean 'collect'.*{__file__}"):
        fake_daemon.start(Wrong)

    class Needing(DaemonPlugin):
        name = "needing"

        @hookimpl
        def configure(self, options):
            self.url = options["url"]

    with pytest.raises(PluginError, match=r"needing: configure: KeyError: 'url' .*options\[.url.\]"):
        fake_daemon.start(Needing)
    fake_daemon.start(Needing, url="x")
    assert fake_daemon.plugin("needing").url == "x"


FILE = """
from hookd.serving import DaemonPlugin, hookimpl

class Ours(DaemonPlugin):
    name = "ours"

    @hookimpl
    def collect(self, run, ranks, metrics):
        metrics.gauge("ranks", "Ranks.", len(ranks))
"""


def test_it_needs_no_torch_and_loads_a_file_as_from_a_plugin_directory(tmp_path):
    (tmp_path / "hookd_ours.py").write_text(FILE)
    code = f"""
    import sys
    from pathlib import Path
    from hookd.testing import FakeDaemon
    assert "hookd.tool.daemon" not in sys.modules
    with FakeDaemon() as daemon:
        daemon.start(Path({str(tmp_path)!r}, "hookd_ours.py"))
        daemon.ranks(2)
        daemon.look()
        daemon.assert_metrics({{'hookd_ours_ranks{{run="train.py"}}': 2}})
        daemon.stop_clean()
    sys.exit(3 if "torch" in sys.modules or "hookd_ours" in sys.modules else 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False,
        cwd=REPOSITORY,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_of_the_guide_passes_the_test_of_the_guide(tmp_path):
    """docs/daemon-plugins.md has the plugin, docs/testing.md the test, which finds its class by name."""
    plugin = re.search(r"^```python\n(.*?)^```", (DOCS / "daemon-plugins.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    indented = re.search(
        r"^    def (test_it_tells_how_far.*?)^\S", (DOCS / "testing.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "spread.py").write_text(plugin)
    scope = {"Spread": tmp_path / "spread.py"}
    exec(textwrap.dedent(f"    def {indented[1]}"), scope)
    with FakeDaemon() as daemon:
        scope["test_it_tells_how_far_the_ranks_are_apart"](daemon)
        daemon.stop_clean()


def test_what_there_is_not_cannot_be_started(fake_daemon, tmp_path):
    with pytest.raises(PluginError, match="there is no daemon plugin 'nonsense'"):
        fake_daemon.start("nonsense")
    (tmp_path / "hookd_broken.py").write_text("def (:\n")
    with pytest.raises(PluginError, match=r"hookd_broken\.py:1: not valid Python"):
        fake_daemon.start(tmp_path / "hookd_broken.py")
