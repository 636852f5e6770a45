"""The kernel refuses what an attach needs: the training continues unchanged, the refusal has a reason, and the next attach works."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hookd.errors import HookdError
from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.config import PluginSpec
from tests.support import cgroup, puppet
from tests.support.puppet import assert_as_before, probe
from tests.support.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

PLUGINS = tuple(map(PluginSpec.parse, ("nan:every=1", "timing", "activations:every=1")))
REQUEST = AttachRequest(plugins=PLUGINS, lease_s=None, timeout_s=30)
FORCED = replace(REQUEST, force=True)
MIB = 1 << 20
CLEAR = {"no-threads", "no-memfd", "no-memory", "no-socket", "no-descriptors", "no-mappings"}
FIRST_FRAME, KEPT = "mmap64", ("_hookd.target.boot.stub.", "_hookd.target.boot.spawn.")
"""A thread's first: without memory for it CPython 3.11 ends the thread, prints that, and keeps the function for ever."""


@pytest.mark.parametrize(
    ("error", "names", "fewer"),
    [
        ("ENOMEM", ("memfd_create",), 0),
        # The wait for an agent whose second thread was refused takes its whole time.
        pytest.param("ENOMEM", ("pthread_create", "memfd_create"), 3, marks=pytest.mark.load),
        *(pytest.param(name, (), 25, marks=pytest.mark.load) for name in ("EMFILE", "EPERM", "ENOMEM")),
    ],
)
def test_whichever_call_is_refused_the_next_attach_succeeds(tmp_path, error, names, fewer):
    """Every call in turn, or those of these names alone."""
    refused, kept = [], set()
    with Refusals(tmp_path) as refusals, puppet.started(**refusals.environment) as target:
        attach(target.pid, REQUEST)
        detach(target.pid)
        before = probe(target)
        for nth in itertools.count(1):
            refusals.refuse(nth, getattr(errno, error), names)
            reason = refusal(target.pid)
            name = refusals.refused()
            refusals.refuse(0, 0)
            assert reason in CLEAR | {""} or (nth, reason) == (2, "timeout"), f"{nth}: {name}: {reason}"
            if not reason:
                detach(target.pid)
            if name == FIRST_FRAME:
                kept |= {one for one in probe(target)["objects"] if one.startswith(KEPT)}
            assert_as_before(target, before, kept)
            if not name:
                break
            refused.append(name)
        assert not [line for line in target.err if "Exception ignored" not in line and line != "MemoryError: "]
    assert set(names) <= set(refused)
    assert len(refused) > fewer, refused


def refusal(pid: int, request: AttachRequest = REQUEST) -> str:
    """Attach, and return the reason why that has failed, "" if it has not."""
    try:
        attach(pid, request)
    except HookdError as error:
        return error.reason
    return ""


def size(pid: int) -> int:
    """Return the bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * mmap.PAGESIZE


@contextlib.contextmanager
def limit(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Lower a limit of a process for a while."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    yield
    resource.prlimit(pid, kind, before)


@pytest.mark.parametrize("rooms", [(2, 18), pytest.param((2, 8, 12, 18), marks=pytest.mark.load)], ids=str)
def test_wherever_it_runs_out_of_memory_the_next_attach_succeeds(rooms):
    with puppet.started() as target:
        before = probe(target)
        for room in rooms:
            with limit(target.pid, resource.RLIMIT_AS, size(target.pid) + room * MIB):
                assert refusal(target.pid, FORCED) in ("no-memory", "no-threads")
            assert_as_before(target, before)
        attach(target.pid, REQUEST)
        detach(target.pid)
        assert_as_before(target, before)
        assert target.err == []


def test_without_room_an_attach_is_refused_and_with_force_it_comes():
    with puppet.started() as target:
        before, used = probe(target), len(os.listdir(f"/proc/{target.pid}/fd"))
        cases = (
            (resource.RLIMIT_AS, size(target.pid) + 300 * MIB, "no-memory"),
            (resource.RLIMIT_NOFILE, used + 10, "no-descriptors"),
        )
        for kind, soft, reason in cases:
            with limit(target.pid, kind, soft):
                assert refusal(target.pid) == reason
                attach(target.pid, FORCED)
                detach(target.pid)
        assert_as_before(target, before)


def test_threads_at_the_limit_of_a_container():
    with cgroup.limited(2, "pids") as group, puppet.started() as target:
        before = probe(target)
        (group / "cgroup.procs").write_text(str(target.pid))
        assert refusal(target.pid) == "no-threads"
        for most in (2, 1):  # the second thread is refused, or the first
            (group / "pids.max").write_text(str(most))
            assert refusal(target.pid, FORCED) == "no-threads"
            assert_as_before(target, before)
        (group / "pids.max").write_text("max")
        assert refusal(target.pid) == ""
        detach(target.pid)
        assert_as_before(target, before)


def test_a_kill_by_the_kernel_for_memory_is_reported_as_such():
    with cgroup.limited(1 << 40) as group, puppet.started() as target:
        (group / "cgroup.procs").write_text(str(target.pid))
        most = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
        most.write_text(str(6 * MIB))
        assert refusal(target.pid) == "no-memory"
        assert refusal(target.pid, FORCED) == "oom-killed"


def test_without_a_descriptor_more_an_agent_is_sent_away_all_the_same():
    with puppet.started() as target:
        before = probe(target)
        attach(target.pid, REQUEST)
        with limit(target.pid, resource.RLIMIT_NOFILE, 1024):
            target.ask("use_up", "^used up$")
            assert detach(target.pid)["restored"] == "identity"
            assert refusal(target.pid) == "no-descriptors"
            target.ask("give_back", "^given back$")
        assert_as_before(target, before)
