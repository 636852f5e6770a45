"""Who holds an agent: daemons and foreground attaches on real agents, and nobody takes what another holds."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import pytest

from hookd.attach import Control
from hookd.attach.discover import find_page
from hookd.daemon.client import DaemonClient
from hookd.errors import DaemonNotRunning, HookdError
from tests.support import training
from tests.support.environment import tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD, Attachment
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(240)]

PUPPET = Job("puppet.py")
RUN = f"leases-{os.getpid()}"


@pytest.fixture
def stack():
    with contextlib.ExitStack() as held:
        yield held


@pytest.fixture
def target(stack):
    process = stack.enter_context(Process(PUPPET.command(), env=training.environment(HOOKD_RUN=RUN), stdin=True))
    process.expect("^ready$")
    return process


@pytest.fixture
def serve(stack, tmp_path):
    """Start `hookd serve`, always with the same socket and state, and give its client."""

    def start(*arguments):
        client = DaemonClient(tmp_path / "control.sock")
        options = ("--state-dir", tmp_path / "state", "--listen", "127.0.0.1:0", "--control", client.path)
        environment = tool_environment(HOOKD_POLL_S="0.1", HOOKD_SCAN_S="0.1")
        process = stack.enter_context(Process([*HOOKD, "serve", *options, *arguments], env=environment))
        client.process = process

        def answers():
            with contextlib.suppress(DaemonNotRunning):
                return client.version()

        wait_until(answers, what="the daemon")
        return client

    return start


def leases(process):
    with Control.connect(process.pid) as control:
        return control.request("status")["leases"]


def has_agent(process):
    fd = find_page(process.pid)
    if fd is None:
        return False
    os.close(fd)
    return True


def row_of(client, process):
    return next((row for row in client.targets() if row["pid"] == process.pid), None)


def test_the_daemon_attaches_holds_and_detaches(serve, target):
    client = serve()
    answer = client.attach(target.pid, timeout_s=30, plugins=["timing"])
    assert (answer["pid"], answer["state"], answer["run"], answer["rank"]) == (target.pid, "attached", RUN, "0")
    assert answer["method"] in ("ptrace", "remote-debug")
    assert leases(target) == 1
    wait_until(lambda: row_of(client, target)["step"]["counted"] > 0, what="steps")
    assert [plugin["name"] for plugin in client.report(target.pid)["plugins"]] == ["timing"]
    assert client.detach(target.pid)["restored"] == "identity"
    wait_until(lambda: not has_agent(target), what="the page is gone")
    assert row_of(client, target)["state"] == "detached"


def test_plugins_come_and_go_through_the_daemon(serve, target):
    client = serve()
    client.attach(target.pid, timeout_s=30, plugins=["timing"])

    def plugins():
        return {row["name"] for row in client.report(target.pid)["plugins"] if row["state"] == "active"}

    path = f"/v1/targets/{target.pid}/plugins"
    client.request("POST", path, {"op": "load", "plugin": "activations:every=1"})
    wait_until(lambda: plugins() == {"timing", "activations"}, what="the plugin is there")
    client.request("POST", path, {"op": "unload", "plugin": "timing"})
    wait_until(lambda: plugins() == {"activations"}, what="the plugin is gone")
    with pytest.raises(HookdError, match="timing"):
        client.request("POST", path, {"op": "unload", "plugin": "timing"})


def test_a_daemon_that_is_killed_and_comes_back_holds_its_agents_again(serve, target):
    first = serve()
    first.attach(target.pid, timeout_s=30)
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    wait_until(lambda: leases(target) == 0, what="the lease is gone with the daemon")
    second = serve()
    wait_until(lambda: leases(target) == 1, what="the new daemon holds the agent")
    assert row_of(second, target)["is_held"]


def test_an_agent_that_nobody_holds_any_more_goes_after_the_lease(serve, target):
    client = serve("--lease-s", "1")
    client.attach(target.pid, timeout_s=30)
    client.process.signal(signal.SIGTERM)
    assert client.process.wait() == 0, client.process.describe()
    wait_until(lambda: not has_agent(target), what="the agent goes by itself")
    assert target.popen.poll() is None


def test_an_agent_attached_to_be_kept_is_held_by_nobody_and_stays(serve, target):
    client = serve("--lease-s", "1")
    client.attach(target.pid, timeout_s=30, keep=True)
    assert leases(target) == 0
    client.process.signal(signal.SIGTERM)
    client.process.wait()
    again = serve("--lease-s", "1")
    wait_until(lambda: row_of(again, target), what="discovery")
    assert leases(target) == 0
    assert has_agent(target)
    again.detach(target.pid)


def test_ctrl_c_of_a_foreground_attach_leaves_the_agent_that_a_daemon_holds(serve, target):
    client = serve()
    client.attach(target.pid, timeout_s=30, plugins=["timing"])
    with Attachment([target.pid], "-p", "nan") as foreground:
        wait_until(lambda: leases(target) == 2, what="both hold the agent")
        foreground.detach()
    assert leases(target) == 1
    assert row_of(client, target)["state"] == "attached"


def test_ctrl_c_of_a_foreground_attach_detaches_also_where_a_daemon_looks_on(serve, target):
    client = serve()
    with Attachment([target.pid], "-p", "timing") as foreground:
        wait_until(lambda: row_of(client, target), what="the daemon sees the agent too")
        foreground.detach()
    wait_until(lambda: not has_agent(target), what="the page is gone")
    wait_until(lambda: row_of(client, target)["state"] == "detached", what="the daemon sees it go")


def test_a_foreground_attach_that_is_killed_leaves_no_orphan_with_a_daemon_nearby(serve, target):
    client = serve()
    with Attachment([target.pid], "-p", "timing") as foreground:
        wait_until(lambda: row_of(client, target), what="the daemon sees the agent too")
        foreground.process.signal(signal.SIGKILL)
        foreground.process.wait()
    wait_until(lambda: leases(target) == 0, what="the lease is gone")
    assert not row_of(client, target)["is_held"]
    client.detach(target.pid)


def test_the_foreground_attach_ends_by_itself_when_its_target_has_ended(target):
    with Attachment([target.pid], "-p", "timing", HOOKD_LINGER_S="1") as foreground:
        wait_until(lambda: foreground.metrics().total("hookd_steps_total") > 0, what="steps")
        target.signal(signal.SIGKILL)
        target.wait()
        assert foreground.process.wait() == 0, foreground.process.describe()


def test_a_foreground_attach_that_cannot_listen_touches_no_target(target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Process([*HOOKD, "attach", str(target.pid), "--listen", address], env=tool_environment()) as tool:
            assert tool.wait() == 1
            assert any("cannot listen" in line for line in tool.err), tool.describe()
    assert not has_agent(target)
