"""`hookd serve` attaches by rule on its own: also to later processes, once, and not to those that a person has detached."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import urllib.request

import pytest

from hookd.errors import DaemonNotRunning
from hookd.tool.daemon.client import DaemonClient
from hookd.tool.linux.owner import user_name
from tests.support import training
from tests.support.environment import bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Metrics, start_hookd
from tests.support.training import Job

pytestmark = [pytest.mark.usefixtures("attachable")]

PUPPET = Job("puppet.py")
USER = user_name(os.getuid())


class Daemon:
    """`hookd serve` with a configuration file."""

    def __init__(self, directory, config, stack):
        directory.mkdir(exist_ok=True)
        (directory / "hookd.toml").write_text(config)
        self.client = DaemonClient(directory / "control.sock")
        state = ("--state-dir", directory / "state", "--control", self.client.path, "--listen", "127.0.0.1:0")
        words = ("serve", "--config", directory / "hookd.toml", *state)
        self.process = stack.enter_context(start_hookd(*words, HOOKD_POLL_S="0.1", HOOKD_SCAN_S="0.2"))
        wait_until(self.answers, what="the daemon")
        self.url = self.client.status()["url"]

    def answers(self):
        assert self.process.popen.poll() is None, self.process.describe()
        with contextlib.suppress(DaemonNotRunning):
            return self.client.version()

    def metrics(self):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return Metrics(answer.read().decode())

    def row(self, pid):
        return next((row for row in self.client.targets() if row["pid"] == pid and row["ended"] is None), None)

    def backing_off(self):
        return {one["pid"]: one for one in self.client.status()["backing_off"]}


@pytest.fixture
def run(tmp_path):
    """A variable's value that no other process of this machine has: a daemon sees them all."""
    return f"{tmp_path.name}-{os.getpid()}"


@pytest.fixture
def serve(stack, tmp_path):
    return lambda config, name="daemon": Daemon(tmp_path / name, config, stack)


@pytest.fixture
def train(stack):
    def start(**extra):
        process = Process(PUPPET.command(), env=training.environment(**extra), stdin=True)
        return stack.enter_context(process)

    return start


@pytest.fixture
def hold_library(stack, tmp_path):
    """Start what looks like a training process from outside, and never comes to the end of `import torch`."""
    library = tmp_path / "libtorch_stub.so"
    library.write_bytes(bytes(4096))
    code = (
        f"import mmap, time\nfile = open({str(library)!r}, 'rb')\n"
        "region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\nprint('ready', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )

    def start(**extra):
        process = stack.enter_context(Process([sys.executable, "-c", code], env=target_environment(**extra)))
        process.expect("^ready$")
        return process

    return start


def test_processes_are_attached_by_rule_or_by_their_own_wish_and_others_left_alone(serve, train, hold_library, run):
    daemon = serve(
        "[attach]\ntimeout_s = 120\n"  # on a busy machine importing torch takes longer than an attach usually waits
        f'[[rule]]\nattach = false\nenvironment = {{ TEAM = "{run}", PART = "debug*" }}\n'
        f'[[rule]]\nmatch = "puppet.py"\nuser = {os.geteuid()}\nenvironment = {{ TEAM = "{run}" }}\nplugins = ["timing"]\n'
    )
    others = [
        hold_library(TEAM="another"),
        hold_library(TEAM=run),  # not by its command line
        hold_library(TEAM=run, PART="debugging", HOOKD="1"),
        hold_library(HOOKD="1", HOOKD_DISABLE="1"),
    ]
    chosen, asks = train(TEAM=run), train(HOOKD="1")
    wait_until(lambda: daemon.metrics().total("hookd_attach_total", result="ok") == 2, what=daemon.process.describe)
    assert {plugin["name"] for plugin in daemon.client.report(chosen.pid)["plugins"]} == {"timing"}
    assert {"nan", "timing", "activations", "learning"} <= {
        plugin["name"] for plugin in daemon.client.report(asks.pid)["plugins"]
    }
    assert not [process.pid for process in others if daemon.row(process.pid) or process.pid in daemon.backing_off()]
    output = daemon.process.describe()
    assert not [process.pid for process in others if re.search(rf"\bprocess {process.pid}\b", output)], output
    assert daemon.metrics().total("hookd_attach_total") == 2, (daemon.metrics().select("hookd_attach_total"), output)


def test_a_process_is_attached_before_its_first_step(serve, stack, run, tmp_path):
    """Its own import of torch takes longer than the daemon needs to find it, and on a busy machine than an attach usually waits."""
    daemon = serve(f'[attach]\ntimeout_s = 120\n[[rule]]\nmatch = "{run}"\n')
    script = tmp_path / f"{run}.py"
    script.write_text(
        "import select, sys, torch\n"
        "model = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "print('ready', flush=True)\nwhile not select.select([sys.stdin], [], [], 0.05)[0]: pass\nsys.stdin.readline()\n"
        "for _ in range(5):\n    opt.zero_grad(); model(torch.ones(2)).sum().backward(); opt.step()\n"
        "print('done', flush=True); sys.stdin.readline()\n"
    )
    process = stack.enter_context(Process([bare_python(), script], env=target_environment(), stdin=True))
    wait_until(
        lambda: daemon.metrics().total("hookd_attach_total", result="ok"), what=daemon.process.describe, timeout_s=120
    )
    process.expect("^ready$")
    process.ask("go", "^done$")
    wait_until(lambda: daemon.metrics().total("hookd_steps_total", run=script.name) == 5, what="every step")
    process.send("end")
    process.finish()


@pytest.mark.load
def test_what_a_person_has_detached_stays_detached_until_a_person_attaches_it(serve, train, run):
    config = f'[[rule]]\nenvironment = {{ TEAM = "{run}" }}\n'
    daemon = serve(config)
    process, witness = train(TEAM=run), None
    wait_until(lambda: daemon.row(process.pid), what="an attach by rule")
    daemon.client.detach(process.pid)
    witness = train(TEAM=run)  # when this one is attached, the rules have been asked about the other again
    wait_until(lambda: daemon.row(witness.pid), what="an attach by rule")
    assert daemon.row(process.pid) is None
    daemon.process.signal(15)
    daemon.process.wait()
    again = serve(config)
    wait_until(lambda: again.row(witness.pid), what="the agent that is there")
    second = train(TEAM=run)
    wait_until(lambda: again.row(second.pid), what="an attach by rule")
    assert again.row(process.pid) is None
    again.client.attach(process.pid)
    assert again.row(process.pid)


@pytest.mark.load
def test_two_daemons_with_the_same_rule_attach_once(serve, train, run):
    config = f'[[rule]]\nenvironment = {{ TEAM = "{run}" }}\n'
    daemons = [serve(config, name) for name in ("one", "two")]
    process = train(TEAM=run)
    for daemon in daemons:
        wait_until(lambda daemon=daemon: daemon.row(process.pid), what="the target at both")
    attached = {daemon.row(process.pid)["attached"] for daemon in daemons}
    assert len(attached) == 1
    process.expect("^ready$")


def test_a_failed_attach_is_tried_again_later_and_reported(serve, hold_library, run):
    process = hold_library(TEAM=run)
    daemon = serve(f'[attach]\ntimeout_s = 1\n[[rule]]\nenvironment = {{ TEAM = "{run}" }}\n')
    reported = wait_until(lambda: daemon.backing_off().get(process.pid), what="a failed attach")
    assert reported["failures"] == 1
    # Who is quicker, the target or the tool: where all that was queued has run without torch, it may be a subinterpreter's.
    assert reported["reason"] in ("blocked", "no-torch", "timeout", "subinterpreter")
    assert 0 < reported["again_in_s"] <= 10
    metrics = daemon.metrics()
    assert metrics.total("hookd_attach_backing_off") == 1
    assert metrics.total("hookd_attach_total", result=reported["reason"]) == 1
    daemon.process.expect(rf"process {process.pid} of user {USER}: attach by rule 1 \(.*\) failed")
    status = json.loads(_status(daemon))
    assert status["daemon"]["backing_off"][0]["pid"] == process.pid


def _status(daemon):
    with start_hookd("status", "--json", "--host", f"unix://{daemon.client.path}") as process:
        return "\n".join(process.finish())
