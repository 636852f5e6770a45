"""A person's plugins in one real training: carried there, changed while it runs, quarantined, and served from the daemon."""

from __future__ import annotations

import json
import os
import re
import textwrap

import pytest

from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.attach.change import change
from hookd.tool.config import PluginSpec
from hookd.tool.linux.owner import user_name
from tests.support import puppet, training
from tests.support.daemon import Daemon
from tests.support.environment import REPOSITORY, TARGETS, bare_python, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD, Page, start_hookd

pytestmark = [pytest.mark.e2e, pytest.mark.story, pytest.mark.usefixtures("attachable")]

RUN = f"plugins-{os.getpid()}"

COUNTS = """
__version__ = "{version}"
from hookd import Plugin, hookimpl

class Counts(Plugin):
    \"\"\"Counts steps, by {by}.\"\"\"

    name = "counts"

    @hookimpl
    def configure(self, context):
        self.by = {by}
        self.steps = context.counter("steps", "Steps.").labels()
        self.kinds = context.counter("kinds", "Steps.", ["by"])

    @hookimpl
    def step_post(self, optimizer):
        self.steps.inc(self.by)
        self.kinds.labels(str(self.by)).inc()
        {more}
"""
INSTALLED = """
from hookd import Plugin, hookimpl
from hookd_theirs.part import one

class Theirs(Plugin):
    name = "theirs"

    @hookimpl
    def configure(self, context):
        self.steps = context.counter("steps", "Steps.").labels()

    @hookimpl
    def step_post(self, optimizer):
        self.steps.inc(one)
"""


WATCHES = """
import time
import click
from hookd.serving import DaemonPlugin, Panel, hookimpl

@click.command()
def watched():
    click.echo("from a plugin")

class Watches(DaemonPlugin):
    name = "watches"

    @hookimpl
    def configure(self, options):
        self.file = open(options["file"], "w", buffering=1)

    @hookimpl
    def target_attached(self, target):
        print("attached", target.pid, file=self.file)

    @hookimpl
    def target_lost(self, target, reason):
        print("lost", target.pid, reason, file=self.file)

    @hookimpl
    def incident(self, incident):
        print("incident", incident["kind"], incident["run"], file=self.file)

    @hookimpl
    def collect(self, run, ranks, metrics):
        metrics.gauge("steps", "Steps.", ranks[0].value("hookd_steps_total") or 0)

    @hookimpl
    def web_panel(self):
        return Panel("Watched", ("what",), [("<script>",)])

    @hookimpl
    def register_commands(self):
        return [watched]
"""
STUCK = """
import time
from hookd.serving import DaemonPlugin, hookimpl

class Stuck(DaemonPlugin):
    name = "stuck"

    @hookimpl
    def collect(self, run):
        time.sleep(600)
"""
WRONG = """
import torch
from hookd.serving import DaemonPlugin, hookimpl

class Wrong(DaemonPlugin):
    name = "wrong"

    @hookimpl
    def register_commands(self):
        return []
"""


def write(folder, path, text):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


class Scene:
    """A daemon with a directory of plugins, and a training whose own environment has one more."""

    def __init__(self, stack, folder):
        self.plugins = folder / "plugins"
        write(folder, "site/hookd_theirs/__init__.py", INSTALLED)
        write(folder, "site/hookd_theirs/part.py", "one = 1.0\n")
        write(folder, "site/theirs-2.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: theirs\nVersion: 2.5\n")
        write(folder, "site/theirs-2.5.dist-info/entry_points.txt", "[hookd.plugins]\ntheirs = hookd_theirs:Theirs\n")
        here = folder / "here"
        write(here, "hookd_needs.py", INSTALLED.replace("hookd_theirs.part", "small.part").replace("heirs", "needs")
              .replace("Tneeds", "Needs").replace('"tneeds"', '"needs"'))  # fmt: skip
        write(here, "hookd_needs-3.0.dist-info/METADATA", "Name: hookd-needs\nVersion: 3.0\nRequires-Dist: small\n")
        write(here, "hookd_needs-3.0.dist-info/entry_points.txt", "[hookd.plugins]\nneeds = hookd_needs:Needs\n")
        write(here, "small/__init__.py", "")
        write(here, "small/part.py", "one = 100\n")
        write(here, "small-1.0.dist-info/METADATA", "Name: small\nVersion: 1.0\n")
        write(here, "small-1.0.dist-info/RECORD", "small/__init__.py,,\nsmall/part.py,,\n")
        self.write(version="1.0", by=1)
        for name, text in (("watches", WATCHES), ("stuck", STUCK), ("wrong", WRONG)):
            write(self.plugins, f"hookd_{name}_daemon.py", text)
        self.reported = folder / "reported"
        allow = ["counts", "theirs", "needs", "nan", "t*", "activations", "watches", "stuck", "wrong"]
        watches = f"[daemon_plugins.watches]\nfile = '{self.reported}'\n"
        (folder / "hookd.toml").write_text(f"[plugins]\nallow = {json.dumps(allow)}\n{watches}")
        self.daemon = Daemon(folder, "--config", folder / "hookd.toml", "--plugin-dir", self.plugins,
                             PYTHONPATH=os.pathsep.join(map(str, (here, REPOSITORY, REPOSITORY / "plugins"))))  # fmt: skip
        stack.callback(self.daemon.process.close)
        command = [bare_python(), TARGETS / "clipping.py", "1", folder / "stop", "0.005"]
        extra = {"PYTHONPATH": str(folder / "site"), "HOOKD_RUN": RUN}
        self.process = stack.enter_context(Process(command, env=training.environment(**extra), cwd=TARGETS))
        self.process.expect("rank 0 step 20", timeout_s=120)
        self.pid = str(self.process.pid)
        self.daemon.client.attach(self.process.pid, timeout_s=60, plugins=["nan"])

    def write(self, version, by, more="pass", name="hookd_counts.py"):
        write(self.plugins, name, COUNTS.format(version=version, by=by, more=more))

    def hookd(self, *words, status=0, json_too=False):
        """Run a command at this daemon; return its messages, or its JSON output."""
        more = ("--host", f"unix://{self.daemon.client.path}", *(["--json"] if json_too else []))
        with start_hookd(*words, *more, COLUMNS="160") as process:
            assert process.wait() == status, process.describe()
            out = "\n".join(process.out)
            return json.loads(out) if json_too else out + "\n".join(process.err)

    def row(self, name):
        listed = self.hookd("plugin", "list", self.pid, json_too=True)
        return next(one for one in listed["plugins"] if one["name"] == name)

    def total(self, metric, **labels):
        return self.daemon.metrics().total(metric, **labels)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    import contextlib

    with contextlib.ExitStack() as stack:
        yield Scene(stack, tmp_path_factory.mktemp("plugins"))


def test_a_plugin_is_loaded_reloaded_and_goes_on_where_the_old_one_was(scene):
    assert "counts 1.0 was loaded" in scene.hookd("plugin", "enable", scene.pid, "counts")
    wait_until(lambda: scene.total("hookd_counts_steps_total") > 3, what="steps")
    first = scene.row("counts")
    scene.write(version="2.0", by=1000)
    before = scene.total("hookd_counts_steps_total")
    assert "counts 2.0 was reloaded" in scene.hookd("plugin", "reload", scene.pid, "counts")
    wait_until(lambda: scene.total("hookd_counts_kinds_total", by="1000") > 3, what="steps of the new source")
    assert scene.total("hookd_counts_steps_total") > before + 3000
    second = scene.row("counts")
    assert (first["version"], second["version"]) == ("1.0", "2.0")
    assert first["sha256"] != second["sha256"]
    log = "\n".join(scene.daemon.process.err)
    for version, did, row in (("1.0", "loaded", first), ("2.0", "reloaded", second)):
        who = rf"plugin counts {version} \(sha256 {row['sha256']}\) {did} in process {scene.pid}, for user {user_name(os.getuid())} "
        assert re.search(who, log), log
    assert re.search(rf"attached to process {scene.pid} .*; plugins nan", log), log
    for carried in ("payload", "plugin nan .*"):
        assert len(re.findall(rf"{carried} has sha256 [0-9a-f]{{64}}$", log, re.MULTILINE)) == 1, log


def test_a_source_that_is_refused_changes_nothing(scene):
    before = scene.row("counts")
    for broken, said in (
        ("raise ValueError('at import')\n", "ValueError: at import"),
        (COUNTS.format(version="3.0", by=1, more="pass").replace("step_post", "step_pots"), "did you mean 'step_post'"),
        ("from hookd import Plugin\n\nclass C(Plugin):\n    name = 'counts'\n    1 +\n", "not valid Python"),
    ):
        write(scene.plugins, "hookd_counts.py", broken if "class" in broken else COUNTS.format(
            version="3.0", by=1, more="pass") + broken)  # fmt: skip
        assert said in scene.hookd("plugin", "reload", scene.pid, "counts", status=2)
    again = scene.total("hookd_counts_kinds_total", by="1000")
    wait_until(lambda: scene.total("hookd_counts_kinds_total", by="1000") > again, what="steps of the old source")
    assert scene.row("counts")["sha256"] == before["sha256"]


def test_enabling_it_anew_takes_the_source_that_is_there_now(scene):
    scene.write(version="4.0", by=7)
    scene.hookd("plugin", "disable", scene.pid, "counts")
    scene.hookd("plugin", "enable", scene.pid, "counts")
    wait_until(lambda: scene.total("hookd_counts_kinds_total", by="7") > 0, what="steps of the new source")
    assert scene.total("hookd_counts_kinds_total", by="1000") == 0


@pytest.mark.load
def test_the_targets_own_environment_has_plugins_too(scene):
    listed = scene.hookd("plugin", "list", scene.pid, json_too=True)["in_target"]
    (theirs,) = [one for one in listed if one["name"] == "theirs"]
    assert (theirs["version"], theirs["shadowed_by"]) == ("2.5", None)
    assert "theirs 2.5 was loaded" in scene.hookd("plugin", "enable", scene.pid, "theirs")
    wait_until(lambda: scene.total("hookd_theirs_steps_total") > 0, what="its steps")
    assert scene.row("theirs")["origin"] == "theirs in the target"
    scene.write(version="9.0", by=3, name="hookd_theirs_ours.py", more="pass")
    source = (scene.plugins / "hookd_theirs_ours.py").read_text().replace('"counts"', '"theirs"')
    (scene.plugins / "hookd_theirs_ours.py").write_text(source)
    (seen,) = scene.hookd(
        "plugin", "list", scene.pid, "--plugin-dir", str(scene.plugins), json_too=True
    )["in_target"]  # fmt: skip
    assert seen["shadowed_by"]["version"] == "9.0"
    said = scene.hookd("plugin", "list", scene.pid, "--plugin-dir", str(scene.plugins))
    assert f"theirs 2.5 is installed in the target, but is loaded from here: 9.0 of {scene.plugins}" in said
    scene.hookd("plugin", "disable", scene.pid, "theirs")
    assert "theirs 9.0 was loaded" in scene.hookd("plugin", "enable", scene.pid, "theirs")
    scene.hookd("plugin", "disable", scene.pid, "theirs")


def test_what_a_plugin_requires_comes_along(scene):
    assert "needs 3.0 was loaded" in scene.hookd("plugin", "enable", scene.pid, "needs")
    wait_until(lambda: scene.total("hookd_needs_steps_total") >= 100, what="its steps")
    scene.hookd("plugin", "disable", scene.pid, "needs")


def test_what_the_list_does_not_allow_is_refused_and_logged(scene):
    said = scene.hookd("plugin", "enable", scene.pid, "optimizer", status=5)
    assert "optimizer is not allowed" in said
    said = scene.hookd("plugin", "enable", scene.pid, "timing", "--plugin-dir", str(scene.plugins), status=5)
    assert "directory of a request" in said
    assert "plugin optimizer is not allowed by [plugins] allow, for user" in "\n".join(scene.daemon.process.err)
    assert "there is no plugin 'tumbleweed'" in scene.hookd("plugin", "enable", scene.pid, "tumbleweed", status=2)


def test_the_list_shows_where_a_plugin_fails_what_it_costs_and_its_series(scene):
    scene.write(version="5.0", by=2, more="if optimizer is not None: raise KeyError('no such thing')")
    scene.hookd("plugin", "reload", scene.pid, "counts")
    wait_until(lambda: scene.row("counts")["errors"] > 0 and scene.row("counts")["error"], what="an error")
    row = scene.row("counts")
    assert row["error"]["where"].startswith("hookd_counts.py:20, in step_post: if optimizer is not None")
    assert row["error"]["text"] == "KeyError: 'no such thing'"
    assert row["series"] == 3, "steps, and those of both kinds: what was counted before goes on"
    wait_until(lambda: scene.row("counts")["call_seconds"], what="its cost")
    said = scene.hookd("plugin", "list", scene.pid)
    assert said.index("at hookd_counts.py:20") < said.index("Traceback")
    assert re.search(r"counts +5\.0 +(active|quarantined) +\d+ +[\d.]+ [mµ]?s +3", said), said


def test_plugins_in_the_daemon_are_notified_and_read_and_a_bad_one_stalls_nobody(scene):
    wait_until(lambda: scene.total("hookd_watches_steps") > 0, what="what the daemon plugin collects")
    (panel,) = json.loads(scene.daemon.get("/api/v1/panels"))["panels"]
    assert panel == {"plugin": "watches", "title": "Watched", "columns": ["what"], "rows": [["<script>"]]}
    wait_until(
        lambda: scene.total("hookd_daemon_plugin_state", plugin="stuck", state="quarantined") == 1, what="its end"
    )
    assert scene.total("hookd_daemon_plugin_errors_total", plugin="stuck", hook="collect") == 1
    scene.daemon.metrics()  # a scrape does not wait for it
    rows = {one["name"]: one for one in scene.hookd("plugin", "list", json_too=True)["daemon"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "watches": "active", "stuck": "quarantined", "wrong": "refused"
    }  # fmt: skip
    assert "the daemon never imports torch" in rows["wrong"]["error"]["text"]
    assert "hookd_wrong_daemon.py:2" in rows["wrong"]["error"]["text"]
    assert "time.sleep(600)" in rows["stuck"]["error"]["where"]
    assert rows["watches"]["sha256"] in "\n".join(scene.daemon.process.err)


def test_commands_of_plugins_come_after_hookds_own_and_a_broken_one_breaks_nothing(scene):
    extra = {"HOOKD_PLUGIN_DIRS": str(scene.plugins)}
    with Process([*HOOKD, "--help"], env=tool_environment(**extra)) as process:
        assert process.wait() == 0
        shown, said = "\n".join(process.out), "\n".join(process.err)
    assert shown.index("  version") < shown.index("  watched")
    assert "hookd_wrong_daemon.py" in said
    with Process([*HOOKD, "watched"], env=tool_environment(**extra)) as process:
        assert process.wait() == 0
        assert process.out == ["from a plugin"]
    with Process([*HOOKD, "version"], env=tool_environment(**extra)) as process:
        assert process.wait() == 0
        assert not process.err, "nothing of a plugin's is imported for hookd's own commands"


def test_nothing_of_the_plugins_stays_after_a_detach(scene):
    scene.daemon.client.detach(scene.process.pid, timeout_s=60)
    scene.process.expect("rank 0 step", after=len(scene.process.out))
    lost = f"lost {scene.pid} "  # others may train on this machine as well
    lines = wait_until(lambda: [one for one in scene.reported.read_text().splitlines() if lost in one], what="the end")
    assert lines == [f"{lost}detached"]
    reported = scene.reported.read_text().splitlines()
    assert reported.count(f"attached {scene.pid}") == 1
    assert reported.count(f"incident quarantine {RUN}") == 1, "counts fails at every step"


ONE_OF_TWO = """
from hookd import Plugin, hookimpl

class Mine(Plugin):
    name = "{name}"

    @hookimpl
    def configure(self, context):
        self.steps = context.counter("steps", "{help}")

    @hookimpl
    def step_post(self, optimizer):
        self.steps.inc()
        if {fails}:
            raise ValueError("planned")
"""


def test_two_directories_may_have_files_of_one_name_and_what_is_counted_goes_on(tmp_path):
    folders = [tmp_path / name for name in ("alpha", "gamma")]
    for folder in folders:
        folder.mkdir()
        (folder / "plugin.py").write_text(ONE_OF_TWO.format(name=folder.name, help="Steps.", fails=False))
    specs = tuple(map(PluginSpec, ("alpha", "gamma")))
    with puppet.started() as target:
        attach(target.pid, AttachRequest(plugins=specs, plugin_dirs=tuple(folders), lease_s=None, timeout_s=60))
        with Page.of(target.pid) as page:

            def steps(name):
                return page.values().get(f"hookd_{name}_steps", {}).get((), 0)

            wait_until(lambda: min(steps("alpha"), steps("gamma")) > 10, what="steps of both")
            before = steps("gamma")
            (folders[1] / "plugin.py").write_text(ONE_OF_TWO.format(name="gamma", help="Steps taken.", fails=before))
            change(target.pid, "reload", PluginSpec("gamma"), folders)
            wait_until(lambda: page.values()["hookd_plugin_errors"].get(("gamma",)), what="the new source")
            assert steps("gamma") > before
        detach(target.pid)
