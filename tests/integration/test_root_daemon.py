"""Root's daemon beside an ordinary user, who may not ask it: hookd must not say that there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from socket import create_server

import pytest
from click.testing import CliRunner

from hookd.errors import DaemonNotRunning
from hookd.tool.cli import checks, root_daemon, status
from hookd.tool.cli.eval import evaluate
from hookd.tool.cli.root_daemon import RootDaemon
from tests.support.daemon import Daemon
from tests.support.environment import tool_environment

AS_NOBODY = """
import http.client, json, os
import encodings.idna
from hookd.tool.cli import root_daemon
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # after the imports: this Python may be out of its reach
print(json.dumps([one.as_json() for one in root_daemon.daemons()]))
"""
ROOTS = RootDaemon(4711, "/run/hookd/control.sock", "http://127.0.0.1:9465/")


def free_port():
    with closing(create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def beside(monkeypatch):
    """An ordinary user without a daemon, beside root's."""
    for name in ("daemon", "reader"):
        monkeypatch.setattr(f"hookd.tool.cli.targets.{name}", lambda *_: None)
    monkeypatch.setattr("hookd.tool.cli.targets.foregrounds", list)
    monkeypatch.setattr("hookd.tool.cli.targets.attached", list)
    monkeypatch.setattr(root_daemon, "find", lambda: ROOTS)


@pytest.mark.skipif(os.geteuid() != 0, reason="the daemon is root's")
def test_another_user_finds_it_by_its_process_and_its_port(stack, tmp_path):
    port = free_port()
    daemon = Daemon(tmp_path, "--listen", f"127.0.0.1:{port}")
    stack.enter_context(daemon.process)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        env=tool_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = {one["pid"]: one for one in json.loads(done.stdout)}[daemon.process.pid]
    assert found["control"] == str(tmp_path / "control.sock")
    assert found["url"] == f"http://127.0.0.1:{port}/"


@pytest.mark.skipif(os.geteuid() != 0, reason="for ordinary users")
def test_root_is_not_notified_of_its_own():
    assert root_daemon.find() is None


def test_status_says_where_it_is_and_what_one_can_do(beside):
    done = CliRunner().invoke(status.status, [], catch_exceptions=False)
    reported = " ".join(done.stderr.split())
    assert "root's runs (process 4711, control socket /run/hookd/control.sock) and answers only root" in reported
    assert "its page is http://127.0.0.1:9465/" in reported
    assert "sudo hookd status" in reported
    assert "none is running" not in reported
    (answer,) = [json.loads(CliRunner().invoke(status.status, ["--json"]).stdout)]
    assert (answer["daemon"], answer["root_daemon"]["url"]) == (None, "http://127.0.0.1:9465/")


def test_the_doctor_says_so_too(beside):
    found = checks.daemon(None)
    assert (found.state, found.found) == ("note", ROOTS.description)
    assert "sudo hookd status" in found.cure
    assert "http" not in RootDaemon(4711, "/run/hookd/control.sock", None).description


def test_an_evaluation_says_so_too(beside):
    with pytest.raises(DaemonNotRunning, match="needs a daemon: root's runs"):
        CliRunner().invoke(evaluate, [str(os.getpid()), "1"], catch_exceptions=False)
