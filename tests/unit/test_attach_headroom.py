"""How much memory the cgroups of a process leave for an agent."""

from __future__ import annotations

import pytest

from hookd.attach import headroom, proc
from hookd.errors import AttachError

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Make a tree of cgroups, and a process in it: of version 2, and of version 1 beside it."""
    homes = tmp_path / "v1", tmp_path / "v2"
    monkeypatch.setattr(headroom, "_V1", homes[0])
    monkeypatch.setattr(headroom, "_V2", homes[1])
    monkeypatch.setattr(headroom, "_FILES", dict(zip(homes, headroom._FILES.values(), strict=True)))

    def make(version, path, used, limit, stat=""):
        group = homes[version - 1] / path
        group.mkdir(parents=True, exist_ok=True)
        usage, most = headroom._FILES[homes[version - 1]]
        for name, text in ((usage, used), (most, limit), ("memory.stat", stat)):
            (group / name).write_text(f"{text}\n")
        line = f"4:memory:/{path}" if version == 1 else f"0::/{path}"
        monkeypatch.setattr(proc, "read", lambda *_: f"{line}\n".encode())

    return make


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_is_nearly_full_is_refused(cgroup, version):
    cgroup(version, "job", 990 * MIB, 1000 * MIB)
    with pytest.raises(AttachError) as caught:
        headroom.require(1)
    assert caught.value.reason == "no-memory"
    assert "has 10 MiB left" in caught.value.message


def test_pages_of_files_can_be_dropped(cgroup):
    cgroup(2, "job", 990 * MIB, 1000 * MIB, f"inactive_file {40 * MIB}\nactive_file {10 * MIB}")
    headroom.require(1)


def test_the_fullest_cgroup_above_decides(cgroup):
    cgroup(2, "slice", 995 * MIB, 1000 * MIB)
    cgroup(2, "slice/job", 10 * MIB, 1000 * MIB)
    with pytest.raises(AttachError):
        headroom.require(1)


def test_no_limit_and_a_cgroup_that_is_not_seen_are_no_hindrance(cgroup):
    cgroup(2, "job", 990 * MIB, "max")
    headroom.require(1)
    cgroup(2, "../outside", 0, 0)
    headroom.require(1)
