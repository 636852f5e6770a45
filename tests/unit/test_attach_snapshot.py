"""A look at a process that becomes another program meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hookd.errors import NoSuchTarget
from hookd.tool.attach import environment, process_snapshot
from hookd.tool.linux import proc
from tests.support import emulated
from tests.support.processes import wait_until

FORKS = """
import os, sys
begin = int(sys.argv[1])
child = os.fork()
if not child:
    os.read(begin, 1)
    os.execve("/bin/sleep", ["sleep", "60"], {"RANK": "1"})
print(child, flush=True)
os.waitpid(child, 0)
"""


@pytest.fixture
def forked(stack):
    """A process that has been forked from another and execs on request: the pid, and how to request it."""
    begin, tell = os.pipe()
    with open(tell, "wb", buffering=0) as stream:
        command = [sys.executable, "-c", FORKS, str(begin)]
        environment = {"PATH": os.environ["PATH"], "RANK": "0"}
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=[begin])
        os.close(begin)
        pid = int(parent.stdout.readline())
        yield pid, lambda: stream.write(b"x")
        os.kill(pid, signal.SIGKILL)
        parent.communicate()


@emulated.lacks("proc")
def test_a_process_that_is_about_to_exec_is_looked_at_again(forked, monkeypatch):
    pid, tell = forked
    looks = []

    def read(pid):
        found = real(pid)
        looks.append(found)
        if len(looks) == 2:
            tell()
        return found

    real = process_snapshot._read
    monkeypatch.setattr(process_snapshot, "_read", read)
    monkeypatch.setattr(process_snapshot, "TRIES", 60_000)
    found = process_snapshot.take(pid)
    assert (looks[0].environ["RANK"], found.environ, found.cmdline) == ("0", {"RANK": "1"}, ("sleep", "60"))
    assert (found.start_ticks, found.uid) == (proc.start_ticks(pid), os.getuid())


def test_a_process_that_stays_as_it_was_forked_is_taken_as_it_is(forked):
    pid, _ = forked
    assert process_snapshot.take(pid).environ["RANK"] == "0"


def test_a_look_that_is_of_two_programs_is_made_again(forked, monkeypatch):
    pid, tell = forked
    real, looks = process_snapshot._read, []

    def read(pid):
        found = real(pid)
        looks.append(found)
        if len(looks) == 1:
            tell()
            wait_until(lambda: environment.of(pid) == {"RANK": "1"}, what="the exec")
        return found

    monkeypatch.setattr(process_snapshot, "_read", read)
    found = process_snapshot.take(pid, settles=False)
    assert len(looks) == 2
    assert found.environ == {"RANK": "1"}


def test_a_process_that_is_not_there_is_said_to_be_so():
    with pytest.raises(NoSuchTarget):
        process_snapshot.take(1 << 30)
