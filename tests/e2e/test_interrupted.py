"""An attach that is interrupted half-way: the tool or its helper is killed at every stage, and the target goes on."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import sys
from pathlib import Path

import pytest

from hookd.attach import proc, remote_debug
from tests.integration.test_inject import mailboxes
from tests.support import stub, training
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(400)]

BUSY = "until_told(lambda: sum(range(200)))"


def interrupt(kind: str, pid: int) -> Process:
    """Attach again and again, and be killed at another stage each time; see tests/support/interrupt.py."""
    environment = tool_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'plugins'}")
    return Process([sys.executable, "-m", "tests.support.interrupt", kind, str(pid)], env=environment, cwd=REPOSITORY)


@pytest.mark.parametrize(("kind", "fewest", "left"), [("tool", 30, 0), ("helper", 15, 2)])
def test_whoever_is_killed_at_whatever_stage_the_next_attach_succeeds_and_nothing_is_left(tmp_path, kind, fewest, left):
    """A helper that dies between making the mailbox and queueing the call leaves it: nobody knows its address."""
    with stub.start(tmp_path, BUSY) as target:
        threads = stub.threads(target.pid)
        with interrupt(kind, target.pid) as interrupts:
            stages = int(re.match(r"stages (\d+)", interrupts.finish(300)[-1])[1])
        assert stages >= fewest, interrupts.describe()
        wait_until(lambda: stub.threads(target.pid) == threads, what="the threads have given up")
        wait_until(lambda: mailboxes(target.pid) <= left, what="the mailboxes are given back")
        stub.finish(target)


def test_a_training_whose_attaches_are_killed_ends_with_the_same_weights_and_without_an_agent(tmp_path):
    job = Job("mlp.py", "--steps 1000")
    training.plain_run(job)
    with training.start(job, "--pause", "0.03", TMPDIR=tmp_path) as target:
        target.expect("^step 1 ")
        with interrupt("agent", target.pid) as interrupts:
            interrupts.expect(r"^all \d+", timeout_s=300)
            lines = target.finish(300)
            interrupts.wait()
        assert training.result(lines) == training.plain_result(job)
        assert target.err == []
        assert not list(tmp_path.iterdir())


def test_the_files_of_a_killed_tool_are_removed_and_those_of_one_that_lives_stay():
    """What CPython 3.14 is told to run lies in a file for a moment, and nobody else would ever remove it."""
    shared = Path("/dev/shm")
    dead, alive, young = (f"hookd-{secrets.token_hex(8)}" for _ in range(3))
    names = [dead + ".py", dead + ".box", alive + ".py", alive + ".box", young + ".box"]
    try:
        for name in names:
            (shared / name).write_text("")
            if not name.startswith(young):
                os.utime(shared / name, (1e9, 1e9))
        with (shared / (alive + ".box")).open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            removed = remote_debug.remove_stale(proc.status(os.getpid()))
        assert {f"/dev/shm/{dead}.py", f"/dev/shm/{dead}.box"} <= set(removed)
        assert [name for name in names if (shared / name).exists()] == [alive + ".py", alive + ".box", young + ".box"]
    finally:
        for name in names:
            (shared / name).unlink(missing_ok=True)
