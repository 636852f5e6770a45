"""Leases of daemons and foreground attaches on real agents: nobody can take an agent that another holds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.request

import pytest

from hookd.errors import DaemonNotRunning, HookdError
from hookd.tool.attach import Control
from hookd.tool.attach.discover import find_page
from hookd.tool.daemon.client import DaemonClient
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.linux import proc
from tests.support import forked, training
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, Metrics, Page, start_hookd
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

PUPPET = Job("puppet.py")
RUN = f"leases-{os.getpid()}"


@pytest.fixture
def target(stack):
    process = stack.enter_context(
        Process(PUPPET.command(), env=training.environment(HOOKD_RUN=RUN), stdin=True, popen=forked.start)
    )
    process.expect("^ready$")
    return process


@pytest.fixture
def serve(stack, tmp_path):
    """Return a function that starts `hookd serve`, with the same socket and state for the same name, and returns its client."""

    def start(*arguments, name="first"):
        client = DaemonClient(tmp_path / f"{name}.sock")
        options = ("--state-dir", tmp_path / name, "--listen", "127.0.0.1:0", "--control", client.path)
        often = {"HOOKD_POLL_S": "0.1", "HOOKD_SCAN_S": "0.1"}
        process = stack.enter_context(start_hookd("serve", *options, *arguments, **often))
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
    answer = client.attach(target.pid, timeout_s=60, plugins=["timing"])
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
    client.attach(target.pid, timeout_s=60, plugins=["timing"])

    def plugins():
        return {row["name"] for row in client.report(target.pid)["plugins"] if row["state"] == "active"}

    path = f"/v1/targets/{target.pid}/plugins"
    client.request("POST", path, {"op": "load", "plugin": "activations:every=1"})
    wait_until(lambda: plugins() == {"timing", "activations"}, what="the plugin is there")
    client.request("POST", path, {"op": "unload", "plugin": "timing"})
    wait_until(lambda: plugins() == {"activations"}, what="the plugin is gone")
    with pytest.raises(HookdError, match="timing"):
        client.request("POST", path, {"op": "unload", "plugin": "timing"})


@pytest.mark.load
def test_a_daemon_that_is_killed_and_comes_back_holds_its_agents_again(serve, target):
    first = serve()
    first.attach(target.pid, timeout_s=60)
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    wait_until(lambda: leases(target) == 0, what="the lease is gone with the daemon")
    second = serve()
    wait_until(lambda: leases(target) == 1, what="the new daemon holds the agent")
    wait_until(lambda: row_of(second, target)["is_held"], what="which it knows a moment after the agent does")


def test_an_agent_that_nobody_holds_any_more_goes_after_the_lease(serve, target):
    client = serve("--lease-s", "1")
    client.attach(target.pid, timeout_s=60)
    client.process.signal(signal.SIGTERM)
    assert client.process.wait() == 0, client.process.describe()
    wait_until(lambda: not has_agent(target), what="the agent goes by itself")
    assert target.popen.poll() is None


def test_an_agent_attached_to_be_kept_is_held_by_nobody_and_stays(serve, target):
    client = serve("--lease-s", "1")
    client.attach(target.pid, timeout_s=60, keep=True)
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
    client.attach(target.pid, timeout_s=60, plugins=["timing"])
    with Attachment([target.pid], "-p", "nan") as foreground:
        wait_until(lambda: leases(target) == 2, what="both hold the agent")
        foreground.detach()
    assert leases(target) == 1
    assert row_of(client, target)["state"] == "attached"


@pytest.mark.load  # killed, or alone, it is in other tests
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


@pytest.mark.load
def test_two_daemons_and_a_foreground_attach_share_one_agent_which_goes_with_the_last(serve, target):
    """All three read the page; those that attached hold a lease, one that merely found the agent does not; none takes it away."""
    first, second = serve("--lease-s", "2"), serve("--lease-s", "3", name="second")
    first.attach(target.pid, timeout_s=60, plugins=["timing"])
    wait_until(lambda: row_of(second, target), what="the second daemon finds it")
    assert [row_of(one, target)["is_held"] for one in (first, second)] == [True, False]
    answer = second.attach(target.pid, timeout_s=60, plugins=["timing", "activations:every=5"])
    assert (answer["method"], answer["added"]) == ("existing", ["activations"])
    assert answer["holders"] == [first.status()["pid"]]
    with Attachment([target.pid], "-p", "timing") as foreground:
        wait_until(lambda: leases(target) == 3, what="all three hold it")
        for url in (first.status()["url"], second.status()["url"], foreground.url):
            wait_until(lambda url=url: up(url) == 1, what=f"{url} serves it")
        foreground.process.signal(signal.SIGKILL)
        foreground.process.wait()
    wait_until(lambda: leases(target) == 2, what="the killed one's lease is gone")
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    wait_until(lambda: leases(target) == 1, what="one holds it still")
    assert row_of(second, target)["state"] == "attached"
    with Control.connect(target.pid) as control:
        control.request(
            "lease", seconds=0
        )  # the lease of 60 s that the killed foreground attach had must not keep the agent in this test
        assert control.request("status")["holders"].count(second.process.pid) == 1
    second.detach(target.pid)
    wait_until(lambda: not has_agent(target), what="the agent is gone")


def test_two_attaches_at_one_moment_bring_one_agent(serve, target):
    first, second = serve(), serve(name="second")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        attaches = [pool.submit(one.attach, target.pid, timeout_s=60, plugins=["timing"]) for one in (first, second)]
        methods = sorted(attach.result()["method"] for attach in attaches)
    assert methods == ["existing", "ptrace" if sys.version_info < (3, 14) else "remote-debug"]
    assert leases(target) == 2
    assert len(pages(target.pid)) == 1
    first.detach(target.pid)
    wait_until(lambda: not has_agent(target), what="the agent is gone")
    assert json.loads(target.ask("probe", "^probe (.*)").group(1))["replaced"] == []


def test_a_holder_that_is_stopped_holds_and_disturbs_nobody(serve, target):
    """A stopped tool is not dead: it may be continued. Its end is what counts, and the training does not wait for it."""
    client = serve("--lease-s", "1")
    client.attach(target.pid, timeout_s=60, plugins=["timing"])
    client.process.signal(signal.SIGSTOP)
    with contextlib.closing(Page.of(target.pid)) as page:
        steps, age = page.values()["hookd_steps"][()], age_s(target)
        wait_until(lambda: page.values()["hookd_steps"][()] > steps + 5, what="steps")
        wait_until(lambda: age_s(target) > age + 3, what="more of the agent's time than a lease lasts, and two ticks")
    assert leases(target) == 1
    client.process.signal(signal.SIGCONT)
    wait_until(lambda: row_of(client, target)["is_held"], what="the daemon goes on where it was")
    client.process.signal(signal.SIGSTOP)
    client.process.signal(signal.SIGKILL)
    client.process.wait()
    wait_until(lambda: not has_agent(target), what="the agent goes by itself")
    assert target.popen.poll() is None


@pytest.mark.load
def test_a_clock_that_is_set_ends_no_lease_and_makes_no_orphan(serve, stack):
    """The target's wall clock jumps forward by ten years, then back by twenty, while leases are counted."""
    script = "import time; real = time.time; time.time = lambda: real() + time.offset; time.offset = 0\n" + CLOCK
    process = stack.enter_context(
        Process([PUPPET.command()[0], "-c", script], env=training.environment(HOOKD_RUN=RUN), stdin=True)
    )
    process.expect("^ready$")
    client = serve("--lease-s", "900")
    for years in (10, -10):
        process.ask(f"{years * 365 * 86400}", "^set$")
        if not has_agent(process):
            client.attach(process.pid, timeout_s=60, plugins=["timing"])
        before = age_s(process)
        wait_until(lambda before=before: age_s(process) > before + 2.5, what="two ticks")
        assert has_agent(process)
    client.process.signal(signal.SIGKILL)
    client.process.wait()
    again = serve("--lease-s", "1")
    wait_until(lambda: row_of(again, process) and row_of(again, process)["is_held"], what="the orphan is adopted")
    again.process.signal(signal.SIGTERM)
    again.process.wait()


def age_s(process):
    with Control.connect(process.pid) as control:
        return control.request("status")["age_s"]


CLOCK = """
import sys, threading
import torch
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
def listen():
    for line in sys.stdin:
        time.offset = float(line)
        print("set", flush=True)
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
while True:
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_the_page_of_a_foreground_attach_shows_its_own_incidents_alone(tmp_path, target):
    """The store outlives targets and daemons; its incidents of other targets do not belong on this page."""
    store = IncidentStore.open(tmp_path)
    incident = {"seq": 1, "time": time.time(), "kind": "nan", "message": "of another process"}
    store.add((1, 1, 1), "other", "0", [incident])
    store.add(
        (target.pid, proc.start_ticks(target.pid), 1), RUN, "0", [{**incident, "message": "of an earlier attach"}]
    )
    store.close()
    with Attachment([target.pid], "-p", "timing", HOOKD_STATE_DIR=tmp_path) as foreground:
        foreground.process.expect("^metrics on")
        with urllib.request.urlopen(foreground.url, timeout=60) as answer:
            text = answer.read().decode()
        assert "of an earlier attach" in text
        assert "of another process" not in text
        foreground.detach()


def up(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return Metrics(answer.read().decode()).total("hookd_target_up", run=RUN)


def pages(pid):
    """Return the inodes of the pages that a process holds; a page is mapped through a descriptor of its own."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "hookd-page" in os.readlink(entry):
                inodes.add(os.stat(entry).st_ino)
    return inodes


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
        with start_hookd("attach", str(target.pid), "--listen", address) as tool:
            assert tool.wait() == 1
            assert any("cannot listen" in line for line in tool.err), tool.describe()
    assert not has_agent(target)
