"""The child that reads a target's memory in our place: its results, and what happens if it never answers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hookd.errors import AttachError
from hookd.tool.linux import accounts, waiter
from hookd.tool.linux.untrusted import UnexpectedError
from hookd.tool.linux.waiter import Waiters
from tests.support.clock import Clock
from tests.support.environment import tool_environment
from tests.support.processes import wait_until

USER = 20001
BUSY = """
import os
from hookd.tool.linux import waiter_child
def pread(*_):
    while not os.path.exists({go!r}):
        pass
    return b"late"
waiter_child.CALLS["pread"] = pread
main()
"""


@pytest.fixture
def waiters():
    made = Waiters()
    yield made
    made.close()


@pytest.fixture
def memory():
    fd = os.open("/proc/self/mem", os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def slow(monkeypatch):
    """Make every child answer its first call and no other, as if a read never returned."""
    stopped = "import os\nfrom hookd.tool.linux import waiter_child\n"
    stopped += "waiter_child.CALLS['pread'] = lambda *_: os.kill(os.getpid(), 19)\nmain()\n"
    monkeypatch.setattr(waiter, "_CHILD", waiter._CHILD.replace("main()\n", stopped))
    monkeypatch.setattr(waiter, "LIMIT_S", 0.2)


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_memory_is_read_and_written(waiters, memory):
    buffer = ctypes.create_string_buffer(b"x" * (1 << 20))
    at = ctypes.addressof(buffer)
    assert waiters.pread(USER, memory, 1 << 20, at) == buffer.raw[:-1]
    assert waiters.pwrite(USER, memory, b"y" * (1 << 19), at + 5) == 1 << 19
    assert buffer.raw[:-1] == b"x" * 5 + b"y" * (1 << 19) + b"x" * ((1 << 19) - 5)


def test_a_file_is_read_from_its_beginning_as_far_as_the_limit(waiters, tmp_path):
    data = os.urandom(300_000)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        for _ in range(2):
            assert waiters.read(USER, file.fileno(), 1 << 20) == data
        assert waiters.read(USER, file.fileno(), 1000) == data[:1000]


def test_errors_are_those_of_the_call(waiters, memory):
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        waiters.pread(USER, memory, 8, 0)
    assert caught.value.errno == errno.EIO
    before = children()
    assert waiters.read(USER, memory, 0) == b""
    assert children() == before, "the same child goes on"


def test_a_child_ends_with_us_and_inherits_nothing(waiters, memory, tmp_path):
    listening = (tmp_path / "file").open("w")
    os.set_inheritable(listening.fileno(), False)
    before = children()
    waiters.read(USER, memory, 0)
    (child,) = children() - before
    with listening:
        opened = [os.readlink(f"/proc/{child}/fd/{number}") for number in os.listdir(f"/proc/{child}/fd")]
    assert sorted(opened)[:2] == ["/dev/null", "/dev/null"]
    assert len(opened) == 3, opened
    waiters.close()
    assert child not in children()


def test_one_that_does_not_answer_is_left_behind_and_the_next_is_answered(waiters, memory, slow):
    before = children()
    with pytest.raises(AttachError, match="did not answer in") as caught:
        waiters.pread(USER, memory, 8, 0)
    assert caught.value.reason == "unreadable"
    assert waiters.read(USER, memory, 0) == b""
    waiters.require_few(USER)
    wait_until(lambda: len(children() - before) == 1, what="its end, and the next one")


def test_one_that_has_no_processor_is_waited_for(waiters, memory, monkeypatch, tmp_path):
    go, is_runnable, looks = tmp_path / "go", waiter._is_runnable, []
    monkeypatch.setattr(waiter, "_CHILD", waiter._CHILD.replace("main()\n", BUSY.format(go=str(go))))
    monkeypatch.setattr(waiter, "LIMIT_S", 0.05)
    monkeypatch.setattr(waiter, "STARVED_S", 3600)

    def look(pid):
        looks.append(pid)
        if len(looks) == 3:
            go.touch()
        return is_runnable(pid)

    monkeypatch.setattr(waiter, "_is_runnable", look)
    assert waiters.pread(USER, memory, 8, 0) == b"late"
    go.unlink()
    monkeypatch.setattr(waiter, "STARVED_S", 0.1)
    with pytest.raises(AttachError, match="did not answer in"):
        waiters.pread(USER, memory, 8, 0)


def test_an_answer_that_comes_while_the_child_is_looked_at_counts(waiters, memory, monkeypatch, tmp_path):
    go, is_runnable = tmp_path / "go", waiter._is_runnable
    monkeypatch.setattr(waiter, "_CHILD", waiter._CHILD.replace("main()\n", BUSY.format(go=str(go))))
    monkeypatch.setattr(waiter, "LIMIT_S", 0.05)

    def look(pid):
        go.touch()
        wait_until(lambda: not is_runnable(pid), what="the answer, after which it waits for the next call")
        return is_runnable(pid)

    monkeypatch.setattr(waiter, "_is_runnable", look)
    assert waiters.pread(USER, memory, 8, 0) == b"late"


def test_answers_that_come_just_in_time_are_bounded_together(memory):
    clock, answers = Clock(), []
    waiters = Waiters(lambda: clock.ns / 1e9)

    def ask():
        while True:
            answers.append(waiters.read(USER, memory, 0))
            clock.advance(0.3)

    with contextlib.closing(waiters):
        with waiters.within(1.0):
            with pytest.raises(AttachError, match="too long") as caught:
                ask()
            with pytest.raises(AttachError, match="too long"), waiters.within(60):  # which gives it no more time
                waiters.read(USER, memory, 0)
        assert caught.value.reason == "unreadable"
        assert len(answers) == 4
        assert waiters.read(USER, memory, 0) == b""


def test_one_that_does_not_answer_is_waited_for_no_longer_than_all_together_may_take(
    waiters, memory, monkeypatch, slow
):
    monkeypatch.setattr(waiter, "LIMIT_S", 3600)
    waiters.read(USER, memory, 0)  # its child has begun
    with waiters.within(0.1):
        with pytest.raises(AttachError) as caught:
            waiters.pread(USER, memory, 8, 0)
        with pytest.raises(AttachError, match="too long"), waiters.within(60):  # which gives it no more time
            waiters.read(USER, memory, 0)
    assert caught.value.reason == "unreadable"
    assert waiters.read(USER, memory, 0) == b""


def test_where_many_wait_a_user_for_whom_none_does_is_not_refused(waiters, monkeypatch):
    left = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(4)]
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # as in a call that cannot be interrupted
    monkeypatch.setattr(waiter, "MOST_LEFT_IN_ALL", 4)
    monkeypatch.setattr(waiter, "MOST_OF_ONE_EACH", 5)
    for number, one in enumerate(left):
        waiters.leave(USER + number, one.pid)
    waiters.require_few(USER + 9)
    with pytest.raises(AttachError, match="4 reads of memory"):
        waiters.require_few(USER)
    monkeypatch.setattr(waiter, "MOST_OF_ONE_EACH", 4)
    with pytest.raises(AttachError, match="4 reads of memory"):
        waiters.require_few(USER + 9)
    for one in left:
        one.communicate(b"\n", timeout=60)


def test_a_user_for_whom_too_many_wait_is_refused_until_one_has_returned(waiters, monkeypatch):
    left = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(waiter.MOST_LEFT)]
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # as in a call that cannot be interrupted
    for one in left:
        waiters.require_few(USER)
        waiters.leave(USER, one.pid)
    monkeypatch.undo()
    with pytest.raises(AttachError, match="4 reads of memory have not returned"):
        waiters.require_few(USER)
    waiters.require_few(USER + 1)
    left[0].stdin.close()
    left[0].wait()
    waiters.require_few(USER)
    for one in left[1:]:
        one.send_signal(signal.SIGKILL)
        one.stdin.close()
        one.wait()


def test_children_that_are_left_are_counted_where_somebody_ignores_their_ends(waiters, monkeypatch):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    left = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(waiter.MOST_LEFT)]
    try:
        monkeypatch.setattr(os, "kill", lambda pid, number: None)  # as in a call that cannot be interrupted
        for one in left:
            waiters.leave(USER, one.pid)
        monkeypatch.undo()
        with pytest.raises(AttachError, match="4 reads of memory have not returned"):
            waiters.require_few(USER)
        left[0].stdin.close()
        left[0].wait()
        waiters.require_few(USER)
    finally:
        for one in left[1:]:
            one.stdin.close()
            one.wait()
        signal.signal(signal.SIGCHLD, before)


def test_what_comes_too_late_is_not_written(waiters, memory):
    buffer = ctypes.create_string_buffer(b"old")
    at = ctypes.addressof(buffer)
    with pytest.raises(TimeoutError):
        waiters.pwrite(USER, memory, b"new", at, time.monotonic() - 1)
    assert buffer.value == b"old"
    assert waiters.pwrite(USER, memory, b"new", at, time.monotonic() + 60) == 3
    assert buffer.value == b"new"


def test_of_a_targets_files_only_what_the_kernel_answers_for_is_handed_over(waiters, tmp_path):
    (tmp_path / "file").write_text("text")
    memory_file = os.memfd_create("page")
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open() as file:
        with pytest.raises(UnexpectedError, match="is a file of user"):
            waiters.call(USER, "open_memory_file", os.getpid(), file.fileno(), (os.getuid(),))
        with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)):
            through_pair(waiters, file.fileno(), os.fstat(file.fileno()).st_ino)
        size, data = waiters.call(USER, "read_part", os.getpid(), file.fileno(), os.getuid(), 1, 2)
        assert (size, data) == (4, b"ex")
    fd = waiters.call(USER, "open_memory_file", os.getpid(), memory_file, (os.getuid(),))
    assert os.path.sameopenfile(fd, memory_file)
    assert not os.get_inheritable(fd)
    for number in (fd, memory_file):
        os.close(number)
    assert len(os.listdir("/proc/self/fd")) == before, "but for the socket of the child"


def through_pair(waiters, number, inode):
    pidfd = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            return waiters.call(USER, "send_through_pair", os.getpid(), number, inode, fds=(pidfd, theirs.fileno()))
        finally:
            os.close(pidfd)


def test_a_socket_is_sent_through_the_one_that_has_the_inode_and_was_made_by_the_process(waiters):
    inner, outer = socket.socketpair()
    with inner, outer:
        inode = os.fstat(outer.fileno()).st_ino
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            through_pair(waiters, outer.fileno(), inode + 1)
        assert through_pair(waiters, outer.fileno(), inode) == os.getpid()
        data, fds, _, _ = socket.recv_fds(inner, 16, 2)
        assert (data, len(fds)) == (b"hookd", 1)
        os.close(fds[0])


def test_in_a_process_that_is_left_behind_itself_there_is_no_child(waiters, memory):
    before = children()
    waiters.make_calls_here()
    assert waiters.read(USER, memory, 0) == b""
    fd = waiters.call(USER, "open_name", os.getpid(), "maps", os.O_RDONLY)
    os.close(fd)
    assert type(fd) is int
    assert children() == before


def test_a_forked_child_has_children_of_its_own(waiters, memory, monkeypatch):
    monkeypatch.setattr(waiter, "WAITERS", waiters)
    os.register_at_fork(after_in_child=waiters.forget)
    assert waiters.read(USER, memory, 0) == b""
    child = os.fork()
    if child == 0:
        os._exit(0 if waiters.read(USER, memory, 0) == b"" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert waiters.read(USER, memory, 0) == b""


def test_one_that_has_been_killed_is_replaced(waiters, memory):
    before = children()
    waiters.read(USER, memory, 0)
    (child,) = children() - before
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z", what="its end")
    assert waiters.read(USER, memory, 0) == b""


@pytest.mark.parametrize(
    ("text", "uid", "owner"),
    [
        ("20001:100000:65536\n", 100_000, 20_001),
        ("20001:100000:65536\n", 165_535, 20_001),
        ("20001:100000:65536\n", 165_536, 165_536),
        ("20001:100000:65536\n", 20_001, 20_001),
        ("root:100000:131072\n", 100_005, 100_000),
        ("root:100000:131072\n", 165_541, 165_536),
        ("nobody-of-this-name:1:9\n::\nx\n7:a:b\n20001:700005:1\n", 700_005, 20_001),
        ("daemon:300000:10\n", 300_009, 300_000),
        ("", 7, 7),
    ],
)
def test_the_user_of_a_lent_uid_answers_for_it(tmp_path, monkeypatch, text, uid, owner):
    file = tmp_path / "subuid"
    monkeypatch.setattr(accounts, "_LENT", file)
    accounts._ranges.cache_clear()
    assert accounts.account(uid) == uid, "without the file"
    file.write_text(text)
    assert accounts.account(uid) == owner
    named = pwd.getpwnam("daemon")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: named)
    accounts._has_name.cache_clear()
    assert accounts.account(uid) == uid, "one that has a name answers for itself"
    accounts._has_name.cache_clear()
    accounts._ranges.cache_clear()


def test_links_of_several_processes_are_read_together(waiters):
    paths = (f"{os.getpid()}/ns/pid", f"{os.getpid()}/fd/{1 << 20}", f"{1 << 30}/exe")
    assert waiters.call(USER, "links", paths) == [os.readlink("/proc/self/ns/pid"), "", ""]


GIVES_UP = """
import os, pathlib
from hookd.tool.linux import waiter_child
from hookd.tool.linux.waiter import Waiters
waiter_child.give_up(1)  # CAP_CHOWN
waiters = Waiters()
waiters.call(0, "links", ())
child = waiters._idle[0].pid
for pid in (os.getpid(), child):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("CapEff")))
waiters.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only exec of root's gives capabilities back")
def test_a_child_has_no_capability_that_we_have_given_up():
    done = subprocess.run(
        [sys.executable, "-c", GIVES_UP], capture_output=True, text=True, timeout=60, check=True, env=tool_environment()
    )
    assert done.stdout.split() == [f"{1:016x}"] * 2
