"""How much memory, and how many threads, mappings and descriptors a process has left for an agent."""

from __future__ import annotations

import os

import pytest

from hookd.errors import AttachError
from hookd.tool.linux import cgroups, headroom, proc

MIB = 1 << 20
MOUNTS = "36 24 0:32 / {v1} rw - cgroup cgroup rw,memory\n37 24 0:33 / {v2} rw - cgroup2 cgroup2 rw\n"


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Make a tree of cgroups, and a process in it whose files of /proc are given: of version 2, and of version 1 beside it."""
    homes = {1: tmp_path / "v1", 2: tmp_path / "v2"}
    files = {
        "limits": "",
        "statm": "1000 500",
        "status": f"Name:\tx\nState:\tS\nUid:\t{os.getuid()}\nGid:\t0\nPPid:\t1",
    }
    for name in homes.values():
        name.mkdir()
    (tmp_path / "mountinfo").write_text(MOUNTS.format(v1=homes[1], v2=homes[2]))
    monkeypatch.setattr(cgroups, "_MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(proc, "read", lambda _, name: files[name].encode())

    def make(version, path, **values):
        group = homes[version] / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (group / name.replace("_", ".", 1)).write_text(f"{value}\n")
        files["cgroup"] = f"4:memory:/{path}\n" if version == 1 else f"0::/{path}\n"
        return files

    return make


def refusal(maps=()):
    with pytest.raises(AttachError) as caught:
        headroom.require(os.getpid(), maps)
    assert "--force" in caught.value.hint
    return f"{caught.value.reason}: {caught.value.message}"


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_is_nearly_full_is_refused(process, version):
    names = ("memory_usage_in_bytes", "memory_limit_in_bytes") if version == 1 else ("memory_current", "memory_max")
    process(version, "job", **dict(zip(names, (990 * MIB, 1000 * MIB), strict=True)), memory_stat="")
    assert refusal().startswith("no-memory:")
    assert "has 10 MiB left" in refusal()
    assert refusal().endswith("the kernel could kill the training")


def test_above_memory_high_the_training_would_wait(process):
    process(2, "job", memory_current=990 * MIB, memory_max="max", memory_high=1000 * MIB, memory_stat="")
    assert "has 10 MiB left" in refusal()
    assert refusal().endswith("the kernel could throttle the training until it hardly runs")


def test_pages_of_files_can_be_dropped(process):
    stat = f"inactive_file {40 * MIB}\nactive_file {10 * MIB}"
    process(2, "job", memory_current=990 * MIB, memory_max=1000 * MIB, memory_stat=stat)
    headroom.require(os.getpid(), ())


def test_pages_of_files_are_those_of_all_groups_below_where_version_1_counts_both(process):
    stat = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {40 * MIB}\ntotal_active_file {10 * MIB}"
    process(1, "job", memory_usage_in_bytes=990 * MIB, memory_limit_in_bytes=1000 * MIB, memory_stat=stat)
    headroom.require(os.getpid(), ())


def test_the_fullest_cgroup_above_decides(process):
    process(2, "slice", memory_current=995 * MIB, memory_max=1000 * MIB, memory_stat="")
    process(2, "slice/job", memory_current=10 * MIB, memory_max=1000 * MIB, memory_stat="")
    assert refusal().startswith("no-memory:")


def test_no_limit_and_a_cgroup_that_is_not_seen_are_no_hindrance(process):
    process(2, "job", memory_current=990 * MIB, memory_max="max", memory_stat="", pids_current=9, pids_max="max")
    headroom.require(os.getpid(), ())
    process(2, "../outside", memory_current=0, memory_max=0, memory_stat="")
    headroom.require(os.getpid(), ())


def test_threads_at_the_limit_of_a_cgroup_are_refused(process):
    process(2, "job", pids_current=98, pids_max=100)
    assert refusal().startswith("no-threads: process ")
    assert "2 more threads" in refusal()


def test_what_limits_the_process_itself_is_refused(process):
    files = process(2, "job")
    files["limits"] = "Max address space         67108864             unlimited            bytes     \n"
    assert refusal().startswith("no-memory:")
    files["limits"] = "Max open files            3                    4096                 files     \n"
    assert refusal().startswith("no-descriptors:")
    files["limits"] = "Max open files            unlimited            unlimited            files     \n"
    headroom.require(os.getpid(), ())


def test_mappings_at_the_limit_of_the_kernel_are_refused(process):
    process(2, "job")
    most = int(headroom._MOST_MAPPINGS.read_text())
    assert refusal([None] * (most - 5)).startswith("no-mappings:")


def test_a_machine_that_promises_no_more_memory_than_it_has_is_refused_near_its_limit(process, tmp_path, monkeypatch):
    process(2, "job")
    mode, memory = tmp_path / "overcommit_memory", tmp_path / "meminfo"
    monkeypatch.setattr(headroom, "_OVERCOMMIT", mode)
    monkeypatch.setattr(headroom, "_MEMORY", memory)
    memory.write_text("CommitLimit:     1048576 kB\nCommitted_AS:     983040 kB\n")
    mode.write_text("2\n")
    assert refusal().startswith("no-memory: this machine can commit 64 more MiB")
    mode.write_text("0\n")
    headroom.require(os.getpid(), ())
    mode.write_text("2\n")
    memory.write_text("CommitLimit:     1048576 kB\nCommitted_AS:     524288 kB\n")
    headroom.require(os.getpid(), ())
