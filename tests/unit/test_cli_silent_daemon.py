"""A daemon that does not answer, because it is stopped: read-only commands work without it, unless it was named."""

from __future__ import annotations

import os
import socket

import pytest

from hookd.errors import DaemonSilent, UsageError
from hookd.tool.cli import checks, targets
from hookd.tool.cli.top import node
from hookd.tool.cli.top.node import Node
from hookd.tool.daemon.client import DaemonClient


@pytest.fixture
def path(stack, tmp_path, monkeypatch):
    """The default control socket, on which this process listens and never answers; one more may wait there."""
    for name in ("HOOKD_HOST", "HOOKD_CONTROL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hookd.tool.cli.targets.ANSWER_S", 0.1)
    monkeypatch.setattr("hookd.tool.daemon.client.default_control_path", lambda *_: tmp_path / "control.sock")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(tmp_path / "control.sock"))
    listener.listen(0)
    return tmp_path / "control.sock"


def test_who_only_looks_is_warned_and_does_without_it(path, capsys):
    assert targets.reader(None) is None
    output = capsys.readouterr().err
    assert f"warning: the daemon on {path} (process {os.getpid()}) does not answer within 0.1 s" in output
    assert "continue to train" in output


def test_who_changes_something_or_names_it_is_refused(path):
    with pytest.raises(DaemonSilent, match="does not answer within") as caught:
        targets.daemon(None)
    assert (caught.value.reason, caught.value.exit_code) == ("silent", 1)
    with pytest.raises(DaemonSilent, match="does not answer within"):
        targets.reader(f"unix://{path}")


def test_the_doctor_tells_of_it_and_goes_on(path):
    found = checks.daemon(None)
    assert (found.name, found.state) == ("daemon", "bad")
    assert "does not answer" in found.found
    assert "see its log" in found.cure
    gone = checks.daemon(f"unix://{path}x")
    assert (gone.state, "omit --host" in gone.cure) == ("bad", True)
    with pytest.raises(UsageError):
        checks.daemon("tcp://localhost")


def test_one_at_which_too_many_wait_is_there_all_the_same(path, stack):
    waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    waiting.connect(str(path))
    with pytest.raises(DaemonSilent, match=f"the daemon on {path} does not answer within 0.1 s") as caught:
        targets.daemon(None)
    assert caught.value.reason == "silent"


def test_the_live_view_goes_on_and_says_so(path, monkeypatch):
    monkeypatch.setattr(node, "ASK_S", 0.1)
    view = Node(DaemonClient(path))
    try:
        view.read(1.0)
    finally:
        view.close()
    assert view.daemon == "daemon does not answer"
