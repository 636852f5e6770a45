"""An attach that is interrupted half-way: the tool or its helper is killed at every stage, and the target goes on."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import signal
import sys
from pathlib import Path

import pytest

from hookd.tool.attach import Control, detach, discover
from hookd.tool.inject import remote_debug
from hookd.tool.linux import proc
from tests.support import stub, training
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

WORKING = "until_stopped(lambda: time.sleep(0.001))"


def interrupt(kind: str, pid: int) -> Process:
    """Attach again and again, killed at another stage each time; see tests/support/interrupt.py."""
    environment = tool_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'plugins'}")
    return Process([sys.executable, "-m", "tests.support.interrupt", kind, str(pid)], env=environment, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("kind", "fewest", "left"), [pytest.param("tool", 30, 0, marks=pytest.mark.load), ("helper", 15, 2)]
)
@pytest.mark.load
def test_whoever_is_killed_at_whatever_stage_the_next_attach_succeeds_and_nothing_is_left(tmp_path, kind, fewest, left):
    """A helper that dies between making the mailbox and queueing the call leaves it behind: nobody knows its address."""
    with stub.start(tmp_path, WORKING) as target:
        threads = stub.threads(target.pid)
        with interrupt(kind, target.pid) as interrupts:
            stages = int(re.match(r"stages (\d+)", interrupts.finish(300)[-1])[1])
        assert stages >= fewest, interrupts.describe()
        wait_until(lambda: stub.threads(target.pid) == threads, what="the threads have given up")
        wait_until(lambda: stub.mailboxes(target.pid) <= left, what="the mailboxes are given back")
        stub.finish(target)


@pytest.mark.load
def test_a_training_whose_attaches_are_killed_ends_with_the_same_weights_and_without_an_agent(tmp_path):
    job = Job("mlp.py", "--steps 1000")
    training.plain_run(job)
    # It trains for longer than all stages take on a slow machine.
    with training.start_warm(job, "--pause", "0.07", TMPDIR=tmp_path) as target:
        target.expect("^step 1 ")
        with interrupt("agent", target.pid) as interrupts:
            interrupts.expect(r"^all \d+", timeout_s=300)
            lines = target.finish(300)
            interrupts.wait()
        assert training.result(lines) == training.plain_result(job)
        assert target.err == []
        assert not list(tmp_path.iterdir())


@pytest.mark.load
def test_an_agent_to_be_kept_whose_tool_died_before_it_saw_it_is_kept_by_nobody():
    with Process(Job("puppet.py").command(), env=training.environment(), stdin=True) as target:
        target.expect("^ready$")
        with Process([sys.executable, "-c", AT_SEEN, str(target.pid)], env=tool_environment()) as tool:
            assert tool.wait() == -signal.SIGKILL, tool.describe()
        assert discover.identity(target.pid)["keep"]
        wait_until(lambda: not discover.identity(target.pid)["keep"], what="the agent notices")
        with Control.connect(target.pid) as control:
            control.request("lease", seconds=0)
        detach(target.pid)


def patched(word: str, act: str) -> str:
    """Return a program that attaches, and does something to itself before it writes a word of the mailbox."""
    return f"""
import os, signal, sys
from hookd.tool.attach import AttachRequest
from hookd.tool.inject import mailbox
from hookd.errors import HookdError
write = mailbox.set_word
def patched(box, offset, value):
    if offset == mailbox.{word}:
        os.kill(os.getpid(), signal.{act})
    write(box, offset, value)
mailbox.set_word = patched
"""


AT_SEEN = (
    patched("SEEN", "SIGKILL")
    + "from hookd.tool.attach import attach\nattach(int(sys.argv[1]), AttachRequest((), lease_s=None))"
)
AT_LENGTH = (
    patched("LENGTH", "SIGSTOP")
    + """
from tests.support import stub
try:
    stub.inject(int(sys.argv[1]), request=AttachRequest((), timeout_s=1))
except HookdError as error:
    print("refused", error.reason, error.message)
"""
)


@stub.queued
def test_a_tool_that_is_stopped_half_way_writes_nothing_when_it_goes_on(tmp_path):
    """By then the target has got the mailbox's memory back, and may have put other things in its place."""
    environment = tool_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'plugins'}")
    with stub.start(tmp_path, WORKING) as target:
        threads = stub.threads(target.pid)
        with Process([sys.executable, "-c", AT_LENGTH, str(target.pid)], env=environment, cwd=REPOSITORY) as stopped:
            wait_until(lambda: proc.status(stopped.pid).state == "T", what="the tool stops")
            wait_until(
                lambda: stub.threads(target.pid) == threads and not stub.mailboxes(target.pid), what="it is given up"
            )
            stopped.signal(signal.SIGCONT)
            stopped.expect(rf"^refused timeout .*process {target.pid} timed out")
            stopped.finish()
        stub.inject(target.pid)
        stub.finish(target)


def test_the_files_of_a_killed_tool_are_removed_and_those_of_one_that_lives_stay():
    """CPython 3.14 runs code from a file that exists for a moment; nobody else would ever remove it."""
    shared = Path("/dev/shm")
    dead, alive, young = (f"hookd-{secrets.token_hex(8)}" for _ in range(3))
    names = [dead + ".py", dead + ".box", alive + ".py", alive + ".box", young + ".box"]
    try:
        for name in names:
            (shared / name).write_text("")
            if not name.startswith(young):
                os.utime(shared / name, (1e9, 1e9))
        with (shared / (alive + ".box")).open("r+") as box:
            fcntl.flock(box, fcntl.LOCK_EX)
            removed = remote_debug.remove_stale(proc.status(os.getpid()))
        assert {f"/dev/shm/{dead}.py", f"/dev/shm/{dead}.box"} <= set(removed)
        assert [name for name in names if (shared / name).exists()] == [alive + ".py", alive + ".box", young + ".box"]
    finally:
        for name in names:
            (shared / name).unlink(missing_ok=True)
