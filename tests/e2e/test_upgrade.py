"""Agents of other versions of hookd: copies of this tree with another number, attached by their own command."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from hookd.errors import AttachError
from hookd.tool.attach import AttachRequest, Control, attach, discover, upgrade
from hookd.tool.config import PluginSpec
from hookd.version import __version__
from hookd.wire import page
from tests.support import forked, tool, training
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.training import Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

PUPPET = Job("puppet.py")
OLDER, NEWER = "0.0.9", "99.0.0"


@pytest.fixture
def target():
    with Process(PUPPET.command(), env=training.environment(), stdin=True, popen=forked.start) as process:
        process.expect("^ready$")
        yield process


class Other:
    """Another version of hookd, with another layout of its pages; its agents publish their version."""

    def __init__(self, home: Path, version: str, protocol: int) -> None:
        self.home = home
        for name in ("hookd", "plugins"):
            shutil.copytree(REPOSITORY / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        (home / "hookd" / "version.py").write_text(f'__version__ = "{version}"\n')
        layout = home / "hookd" / "wire" / "page" / "layout.py"
        text = layout.read_text().replace('"schema": size // 8 * 5', '"schema": size // 8 * 3')
        layout.write_text(re.sub(r"^PROTOCOL = \d+$", f"PROTOCOL = {protocol}", text, flags=re.MULTILINE))
        assert f"PROTOCOL = {protocol}\n" in layout.read_text()

    def start(self, *words: object) -> Process:
        path = f"{self.home}:{self.home / 'plugins'}"
        command = [sys.executable, "-m", "hookd", *map(str, words)]
        return Process(command, env=tool_environment(PYTHONPATH=path, HOOKD_STATE_DIR=self.home), cwd=self.home)

    def attach(self, pid: int, *words: object) -> Process:
        """Attach in the foreground, and wait until its agent is there."""
        process = self.start("attach", pid, "--listen", "127.0.0.1:0", *words)
        process.expect(r"^attached to ")
        return process


@pytest.fixture
def older(tmp_path):
    return Other(tmp_path / "older", OLDER, page.PROTOCOL + 7)


@pytest.fixture
def newer(tmp_path):
    return Other(tmp_path / "newer", NEWER, page.PROTOCOL + 8)


def keep(other: Other, pid: int, *plugins: str) -> None:
    """Leave an agent of the other version in a process, held by nobody."""
    with other.attach(pid, "--keep", *tool.plugin_options(plugins)) as process:
        process.signal(2)
        process.finish()


def loaded(pid: int) -> dict[str, dict[str, str]]:
    with Control.connect(pid) as control:
        return {plugin["name"]: plugin["options"] for plugin in control.request("status")["plugins"]}


def test_an_older_agent_that_nobody_holds_is_replaced_and_its_plugins_come_back(target, older):
    keep(older, target.pid, "timing", "activations:every=7")
    there = discover.identity(target.pid)
    assert (there["agent_version"], there["protocol"]) == (OLDER, page.PROTOCOL + 7)
    request = AttachRequest((PluginSpec("nan", {"every": "3"}), PluginSpec("timing")), timeout_s=60, lease_s=1)
    result = attach(target.pid, request)
    assert (result.replaced, result.method) == (OLDER, "ptrace" if sys.version_info < (3, 14) else "remote-debug")
    here = discover.identity(target.pid)
    assert (here["agent_version"], here["protocol"], here["keep"]) == (__version__, page.PROTOCOL, True)
    assert loaded(target.pid) == {"nan": {"every": "3"}, "timing": {}, "activations": {"every": "7"}}
    with contextlib.closing(tool.Page.of(target.pid)) as ours:
        before = ours.values()["hookd_steps"][()]
        wait_until(lambda: ours.values()["hookd_steps"][()] > before + 2, what="steps under the new agent")
    assert json.loads(target.ask("probe", "^probe (.*)").group(1))["module hooks"] == 0
    tool.hookd("detach", str(target.pid))
    assert discover.identity(target.pid) is None


def test_the_command_says_that_it_replaces_and_what_was_to_be_kept_is_kept(target, older):
    keep(older, target.pid, "timing")
    with tool.Attachment([target.pid], "-p", "nan") as foreground:
        foreground.process.expect(rf"attached to {target.pid} .* nan, timing in place of the agent of hookd {OLDER}: ")
        foreground.process.expect("Ctrl-C ends this$")
        foreground.detach()
    assert discover.identity(target.pid)["agent_version"] == __version__


def test_an_agent_that_another_tool_holds_is_left_and_its_holder_named(target, older):
    with older.attach(target.pid, "-p", "timing") as holder:
        refused = refusal(target.pid)
        assert f"held by process {holder.pid}" in refused.message
        assert f"hookd detach {target.pid}" in refused.hint
        assert discover.identity(target.pid)["agent_version"] == OLDER
        holder.signal(2)
        holder.finish()


def test_one_that_changes_the_training_is_left(target, older):
    keep(older, target.pid, "gradclip:max_norm=1.0")
    assert "gradclip changes the training" in refusal(target.pid).message
    assert list(loaded(target.pid)) == ["gradclip"]
    tool.hookd("detach", str(target.pid))


def test_a_newer_agent_is_left(target, newer):
    keep(newer, target.pid, "timing")
    assert f"hookd {NEWER}, not older than this one" in refusal(target.pid).message
    status = json.loads(tool.hookd("status", "--json"))
    row = next(row for row in status["targets"] if row["pid"] == target.pid)
    assert row["reason"] == "protocol"
    tool.hookd("detach", str(target.pid))
    assert discover.identity(target.pid) is None


def test_detach_works_from_an_older_hookd_on_a_newer_agent(target, older):
    attach(target.pid, AttachRequest((PluginSpec("timing"),), timeout_s=60, lease_s=None))
    with older.start("detach", target.pid) as process:
        process.finish()
        process.expect("is the original again")
    assert discover.identity(target.pid) is None


def refusal(pid: int) -> AttachError:
    with pytest.raises(AttachError) as caught:
        attach(pid, AttachRequest((), timeout_s=60))
    assert caught.value.reason == "agent-version"
    return caught.value


def test_versions_are_ordered():
    ordered = ["", "0.0.9", "0.1.0.dev3", "0.1.0.dev12", "0.1.0rc1", "0.1.0", "0.1.1", "0.2.0.dev1", "0.10.0", "1.0"]
    ages = [upgrade._age(version, 1) for version in ordered]
    assert ages == sorted(ages)
    assert len(set(map(str, ages))) == len(ages)
    assert upgrade._age("0.1.0", 1) < upgrade._age("0.1.0", 2) < upgrade._age("0.1.1", 1)
