"""Background work of a plugin is done in hookd's own thread, in order, and a detach waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import torch
from torch import nn

from hookd import Plugin, hookimpl
from hookd.target.boot import bootstrap, spawn
from hookd.tool.attach import control
from tests.support.agent import running
from tests.support.environment import tool_environment
from tests.support.processes import wait_until


class Works(Plugin):
    """Queues background work at each call."""

    name = "works"

    def __init__(self) -> None:
        self.seen: list = []
        self.gate = threading.Event()

    @hookimpl
    def configure(self, context) -> None:
        self.context = context

    @hookimpl
    def root_forward(self) -> None:
        number = len(self.seen)
        self.seen.append(None)
        self.context.aside(lambda: self.work(number))

    def work(self, number: int) -> None:
        self.gate.wait(600)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.seen[number] = (spawn.is_own(), signal.SIGTERM in blocked)


def alive() -> list[int]:
    return [ident for ident in sys._current_frames() if ident in spawn.OWN]


def test_work_is_done_in_a_thread_that_goes_when_it_is_done_and_a_detach_waits() -> None:
    with running(Works) as agent:
        plugin = agent.plugin("works")
        for _ in range(3):
            nn.Linear(2, 2)(torch.ones(1, 2))
        assert plugin.seen == [None] * 3, "the training does not wait"
        plugin.gate.set()
        wait_until(lambda: len(alive()) == 1, what="the end of the thread that worked")
        assert plugin.seen == [(True, True)] * 3
        plugin.gate.clear()
        nn.Linear(2, 2)(torch.ones(1, 2))
        threading.Timer(0.2, plugin.gate.set).start()
        bootstrap.stop()
        assert plugin.seen[3] == (True, True)


class Stuck(Works):
    """Queues background work that does not return."""

    name = "stuck"

    def work(self, number: int) -> None:
        self.gate.wait(600)


def test_work_that_does_not_return_is_its_plugins_alone_and_only_so_much_waits(monkeypatch) -> None:
    monkeypatch.setattr("hookd.target.plugins.background.STUCK_S", 0.0)
    monkeypatch.setattr("hookd.target.plugins.background.MOST", 3)
    monkeypatch.setattr("hookd.target.boot.lifecycle.DETACH_S", 0.1)
    with running(Stuck, Works) as agent:
        stuck, works = agent.plugin("stuck"), agent.plugin("works")
        works.gate.set()
        nn.Linear(2, 2)(torch.ones(1, 2))
        wait_until(lambda: None not in works.seen, what="the other's work")
        wait_until(lambda: not agent.parts.background._queues["stuck"].due, what="the beginning of what is stuck")
        for _ in range(5):
            nn.Linear(2, 2)(torch.ones(1, 2))
            wait_until(lambda: None not in works.seen, what="the other's work: it, too, has room for three pieces")
        assert agent.values("hookd_plugin_errors")["stuck",] == 2
        assert "3 pieces of background work are waiting" in agent.parts.registry.named("stuck").last_error["text"]
        assert len(works.seen) == 6
        wait_until(lambda: agent.parts.background._queues["works"].thread is None, what="the end of the other's thread")
        (residue,) = bootstrap.stop()["residue"]
        assert residue.startswith("a thread in the background work of plugin stuck, at ")
        assert residue.endswith("in work: self.gate.wait(600)")
        assert len(alive()) == 1
        stuck.gate.set()
        wait_until(lambda: not alive(), what="its end")
        assert not alive(), "what has not begun is not done after the detach"


def test_a_detach_waits_as_long_as_the_tool_asks_for(monkeypatch) -> None:
    with running() as agent:
        detach, given = agent.agent.detach, []
        monkeypatch.setattr(agent.agent, "detach", lambda timeout_s: (given.append(timeout_s), detach(timeout_s))[1])
        assert control.detach(os.getpid(), 7.5)["restored"] == "identity"
    assert given == [7.5]


def test_what_it_raises_is_the_plugins_error() -> None:
    class Fails(Works):
        def work(self, number: int) -> None:
            raise OSError("no")

    with running(Fails) as agent:
        nn.Linear(2, 2)(torch.ones(1, 2))
        wait_until(lambda: agent.values("hookd_plugin_errors").get(("works",)) == 1)
        assert "OSError: no" in agent.parts.registry.named("works").last_error["text"]


def test_the_end_of_the_process_waits_for_it() -> None:
    code = """
import time, torch, hookd, sys
from hookd.target.boot import bootstrap, spawn
hookd.start(["nan"])
context = bootstrap._agent.parts.registry.named("nan").context
context.aside(lambda: (time.sleep(0.5), print("done", flush=True)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True, env=tool_environment()
    )
    assert done.stdout == "done\n"
