"""A watched process has no thread of hookd's while it forks, and has one again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch  # noqa: F401  an agent wants it in its process

from hookd.target.boot import forking, spawn
from hookd.tool.attach.control import Control
from tests.support import emulated
from tests.support.agent import running
from tests.support.environment import REPOSITORY, TARGETS


def outcome(program: str, *arguments: str) -> dict[str, str]:
    """Return the output of a program, by the first words of its lines."""
    done = subprocess.run(
        [sys.executable, str(TARGETS / program), *arguments],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@emulated.lacks("time")
def test_a_training_of_one_thread_has_one_at_each_fork_and_the_same_weights():
    """Every warning is an error there: of several threads CPython 3.12 and newer warns."""
    plain, watched = outcome("one_thread.py"), outcome("one_thread.py", "--watched")
    assert watched.pop("steps") == "30"
    assert watched == plain
    assert plain["threads"].startswith("[1")


@pytest.mark.parametrize("interrupted", ["a fork in a signal handler", "a handler that raises"])
def test_what_interrupts_a_fork_leaves_the_thread_that_serves(monkeypatch, interrupted):
    with running() as agent:
        forks, control, start = agent.parts.boundaries.resume.__self__, agent.agent._control, spawn.Thread.start
        before = control._service.thread

        def forked():
            forks._before()
            forks._in_parent()
            forks._returned()

        def interrupted_start(thread):
            monkeypatch.undo()
            start(thread)
            forked()

        if interrupted == "a handler that raises":
            forks._before()  # and nothing after it is called
        else:
            monkeypatch.setattr(spawn.Thread, "start", interrupted_start)
        forked()
        assert control._service.thread is not before
        with Control.connect(os.getpid()) as client:
            assert client.request("status")["ok"]
        assert len([one for one in spawn.remaining() if not one.is_over]) == 1


@pytest.mark.parametrize("mode", ["", "warned"])
def test_a_signal_handler_that_raises_while_a_fork_waits_is_the_programs(mode):
    assert outcome("fork_interrupted.py", mode) == {"parent": "interrupted", "child": "0"}


def test_all_forks_together_wait_for_a_busy_thread_no_longer_than_their_share(monkeypatch):
    now, waits = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(forking, "clock", clock)
    monkeypatch.setattr(spawn, "remaining", lambda: [SimpleNamespace(awaited_s=0.0)])
    part = SimpleNamespace(halt=lambda: None)
    forks = forking.Forks(part, part, part, lambda: None)
    for _ in range(6):
        began = now[0]
        forks._end_all(began)
        waits.append(now[0] - began)
    assert waits[0] == pytest.approx(spawn.PATIENCE_S, abs=0.001)
    assert max(waits[1:]) < 0.03
