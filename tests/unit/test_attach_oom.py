"""Processes that were killed for lack of memory: counters of cgroups, the kernel's log, and data that prove nothing."""

from __future__ import annotations

import os

import pytest

from hookd.tool.daemon.fleet.deaths import LATELY_S, MemoryCgroup, MemoryCgroups
from hookd.tool.linux import cgroups, oom, proc

V1 = "36 24 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory"
V2 = "29 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw"
KILLED = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB, UID:0 pgtables:1kB"

NOBODY = 2**22 + 1
"""No pid is as high as this (PID_MAX_LIMIT of include/linux/threads.h)."""


@pytest.fixture
def counter_of(tmp_path, monkeypatch):
    """Return a function that finds the counter of a process from given texts of its /proc/PID/cgroup and our mountinfo."""
    mountinfo = tmp_path / "mountinfo"
    monkeypatch.setattr(cgroups, "_MOUNTS", mountinfo)

    def found(cgroup, mounts):
        monkeypatch.setattr(proc, "read", lambda *_: cgroup.encode())
        mountinfo.write_text(mounts)
        return oom.counter_of(1)

    return found


def counter(directory, name="memory.events", count=0):
    directory.mkdir(parents=True, exist_ok=True)
    text = (
        f"low 0\nhigh 0\noom 0\noom_kill {count}\n" if name == "memory.events" else f"under_oom 0\noom_kill {count}\n"
    )
    (directory / name).write_text(text)
    return directory / name


def test_the_counter_is_that_of_the_process_own_cgroup(counter_of, tmp_path):
    cgroup = "9:name=systemd:/\n4:cpu,memory:/job/0\n0::/other\n"
    found = counter(tmp_path / "my mount/job/0", "memory.oom_control", 3)
    mount = str(tmp_path / "my mount").replace(" ", "\\040")
    assert counter_of(cgroup, V1.format(root="/", mount=mount)) == found
    assert oom.kills(found) == 3


def test_where_a_cgroup_does_not_count_the_nearest_above_it_does(counter_of, tmp_path):
    (tmp_path / "user.slice/job/step").mkdir(parents=True)
    found = counter(tmp_path / "user.slice")
    assert counter_of("0::/user.slice/job/step\n", V2.format(root="/", mount=tmp_path)) == found


def test_a_mount_that_shows_a_part_of_the_tree_is_searched_from_there(counter_of, tmp_path):
    found = counter(tmp_path / "a")
    cgroup = "0::/kubepods/pod1/a\n"
    assert counter_of(cgroup, V2.format(root="/kubepods/pod1", mount=tmp_path)) == found
    assert counter_of(cgroup, V2.format(root="/kubepods/pod2", mount=tmp_path)) is None


@pytest.mark.parametrize("path", ["/../../other", "/nowhere"])
def test_what_our_mounts_do_not_show_has_no_counter(counter_of, tmp_path, path):
    counter(tmp_path.parent / "other")
    assert counter_of(f"0::{path}\n", V2.format(root="/", mount=tmp_path)) is None


def test_the_kernels_log_names_who_was_killed_and_nobody_else_can():
    assert oom.victim(f"3,100,5000000,-;{KILLED}\n SUBSYSTEM=memory\n", 4.0) == 4242
    assert oom.victim("3,100,5000000,-;Out of memory: Killed process 7 (a) total-vm", 4.0) == 7
    assert oom.victim("3,100,5000000,-;Killed process 7 (a), UID 0, total-vm", 4.0) == 7
    for record in (
        f"3,100,3999999,-;{KILLED}",  # before the process began
        f"11,100,5000000,-;{KILLED}",  # written by a program
        f"8,100,5000000,-;{KILLED}",  # likewise, at the gravest level
        "6,100,5000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=Killed process 4242 (,pid=1",
        "6,100,5000000,-;[ 7] 0 7 100 Killed process 4242 (x)",
        "nonsense",
        "",
    ):
        assert oom.victim(record, 4.0) is None, record


@pytest.mark.skipif(not os.access(oom.KERNEL_LOG, os.R_OK), reason="the kernel's log may not be read here")
def test_the_kernels_log_is_read_in_the_first_pid_namespace_alone():
    is_first = proc.link(os.getpid(), "ns/pid") == "pid:[4026531836]"
    assert isinstance(oom.killed(0.0), list if is_first else type(None))


def test_a_kill_is_reported_once_and_not_when_it_was_long_ago(tmp_path):
    now = 0.0
    file = counter(tmp_path, count=5)
    memory = MemoryCgroup(file, lambda: now)
    assert not memory.take(), "those before the target was there"
    counter(tmp_path, count=6)
    memory.poll()
    now += LATELY_S - 1
    assert memory.take()
    assert not memory.take(), "one kill has one victim"
    counter(tmp_path, count=7)
    memory.poll()
    now += LATELY_S + 1
    assert not memory.take()
    file.unlink()
    assert not memory.take(), "the cgroup is gone"


def test_targets_of_one_cgroup_share_what_is_known_of_it(tmp_path, monkeypatch):
    made = counter(tmp_path)
    monkeypatch.setattr(oom, "counter_of", lambda _: made)
    memories = MemoryCgroups(lambda: 0.0)
    first = memories.of(NOBODY)
    counter(tmp_path, count=1)
    memories.poll()
    assert memories.of(NOBODY + 1) is first
    assert first.take()
    monkeypatch.setattr(oom, "counter_of", lambda _: None)
    assert memories.of(NOBODY + 2) is None
