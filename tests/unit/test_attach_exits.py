"""How a process has ended: by the zombie, by its pidfd, and where nobody tells."""

from __future__ import annotations

import os
import select
import signal
import sys

import pytest

from hookd.errors import NoSuchTarget
from hookd.tool.linux import exits, proc
from tests.support import emulated
from tests.support.processes import Process, wait_until

NOBODY = 65534
ENDS = {"3": 3 << 8, "0": 0, "9": signal.SIGKILL, "15": signal.SIGTERM}


class Child:
    """A forked child that waits for its word to end, and is waited for when the test says so."""

    def __init__(self, how="0"):
        reads, self.word = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._end(how, reads)
        os.close(reads)
        self.pidfd, self.ticks = os.pidfd_open(self.pid), proc.start_ticks(self.pid)
        self.image = proc.image(self.pid)
        self._is_reaped = False

    def _end(self, how, reads):
        try:
            os.close(self.word)
            os.read(reads, 1)
            if how in ("9", "15"):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), int(how))
                signal.pause()
            if how == "exec":
                os.execv("/bin/sleep", ["sleep", "600"])
        finally:
            os._exit(int(how))

    def end(self):
        os.write(self.word, b".")
        select.select([self.pidfd], [], [])
        return self

    def reap(self):
        os.waitpid(self.pid, 0)
        self._is_reaped = True
        return self

    def found(self, pidfd=None):
        return exits.find(self.pid, self.ticks, self.image, self.pidfd if pidfd is None else pidfd)

    def close(self):
        os.close(self.word)
        if not self._is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()
        os.close(self.pidfd)


@pytest.fixture
def child(stack):
    def start(how="0"):
        made = Child(how)
        stack.callback(made.close)
        return made

    return start


@pytest.mark.parametrize("how", ENDS)
def test_a_zombie_tells_its_status_with_and_without_a_pidfd(child, how):
    one = child(how).end()
    assert one.found() == one.found(pidfd=-1) == (ENDS[how], "zombie")


def test_who_ends_while_it_is_looked_at_is_said_to_have_ended(child):
    one = child().end()
    with pytest.raises(NoSuchTarget, match=f"process {one.pid} has ended"):
        proc.image(one.pid)
    with pytest.raises(NoSuchTarget, match="there is no process"):
        proc.image(one.reap().pid)


@pytest.mark.parametrize("how", ENDS)
def test_who_was_waited_for_tells_it_through_the_pidfd_alone(child, how):
    one = child(how).end().reap()
    assert one.found(pidfd=-1) == (None, "")
    if one.found() == (None, ""):
        pytest.skip(f"Linux {os.uname().release} has no PIDFD_INFO_EXIT (6.15 and newer)")
    assert one.found() == (ENDS[how], "pidfd")


def test_another_process_of_that_pid_tells_nothing(child):
    one = child("3").end()
    assert exits.find(one.pid, one.ticks + 1, one.image) == (None, "")


@emulated.lacks("proc")
def test_a_process_that_lives_on_is_distinguished_from_one_that_became_another_program(child):
    one = child("exec")
    assert one.found() == (None, "alive")
    os.write(one.word, b".")
    while proc.words(one.pid, "cmdline") != ["sleep", "600"]:
        os.sched_yield()
    assert one.found() == (None, "exec")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_zero_that_the_kernel_shows_to_strangers_is_not_taken_for_an_exit_code(child):
    """Field 52 of /proc/PID/stat is 0 for who may not trace the process, whatever its status."""
    one, reads_writes = child("3").end(), os.pipe()
    stranger = os.fork()
    if not stranger:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.write(reads_writes[1], repr(tuple(one.found(pidfd=-1))).encode())
        os._exit(0)
    os.waitpid(stranger, 0)
    assert os.read(reads_writes[0], 100) == b"(None, '')"
    for end in reads_writes:
        os.close(end)


def test_outside_of_a_container_there_is_no_first_process_of_one():
    assert exits.container_init(os.getpid()) is None
    assert exits.is_alive(os.getpid(), proc.start_ticks(os.getpid()))
    assert not exits.is_alive(os.getpid(), 1)


def test_a_process_runs_until_its_last_thread_ends_and_no_other_is_taken_for_it():
    ticks = proc.start_ticks(os.getpid())
    assert proc.is_running(os.getpid(), ticks)
    assert not proc.is_running(os.getpid(), ticks + 1)
    code = (
        "import ctypes, threading\n"
        "threading.Thread(target=lambda: (print('ready', flush=True), input())).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with Process([sys.executable, "-c", code], env=dict(os.environ), stdin=True) as process:
        process.expect("ready")
        ticks = proc.start_ticks(process.pid)
        wait_until(lambda: proc.status(process.pid).state == "Z", what="the end of its main thread")
        assert proc.is_running(process.pid, ticks)
        process.popen.kill()
        wait_until(lambda: not proc.is_running(process.pid, ticks), what="a zombie that nobody has asked for")
