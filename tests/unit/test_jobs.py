"""A training job is told from every other one, on any machine."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import pytest

from hookd.tool.attach import process_snapshot
from hookd.tool.daemon.fleet import jobs
from hookd.tool.daemon.fleet.identity import Identity
from hookd.tool.linux import proc
from hookd.wire import labels
from tests.support import emulated
from tests.support.processes import Process, wait_until

UUID = "4f0a5a5e-6f0b-4e0e-9d3c-2f1f0c9a7b11"
POD = b"0::/kubepods.slice/kubepods-burstable-pod4f0a5a5e_6f0b_4e0e_9d3c_2f1f0c9a7b11.slice/x.scope\n"
IN_ONE_NODE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen(["sh", "-c", f"RANK={n}; export RANK; " + sys.argv[1]]) for n in range(2)]
[rank.wait() for rank in ranks]
"""
WRAPPED = "sleep 60 & echo pid $!; wait; :"  # the shell stays between the launcher and its rank


@pytest.fixture
def start(stack):
    """Start ranks; return the jobs that they belong to."""

    def ranks(*command, count=1, world_size=1, **variables):
        launcher = stack.enter_context(Process(list(command), env={**os.environ, **variables}))
        pids = [int(launcher.expect(r"^pid (\d+)$", after=line).group(1)) for line in range(count)]
        assert len(set(pids)) == count
        for pid in pids:
            stack.callback(os.kill, pid, signal.SIGKILL)
            # Until its exec it has the environment of its shell.
            wait_until(
                lambda pid=pid: (proc.words(pid, "cmdline") or [""])[0].endswith(("sleep", "python")), what="its exec"
            )
        return [jobs.of(pid, process_snapshot.take(pid), world_size) for pid in pids]

    return ranks


def by_hand(start, rank, **variables):
    """Start a rank from a shell of its own, which reads its commands."""
    where = {"RANK": str(rank), "WORLD_SIZE": "2", **variables}
    shown = " ".join(f"{name}={value}" for name, value in where.items())
    commands = f"env {shown} sleep 60 & echo pid $!; wait; :"
    (job,) = start("sh", "-c", 'echo "$0" | sh', commands, world_size=2)
    return job


@emulated.lacks("proc")
def test_ranks_of_one_launcher_are_one_job_and_those_of_another_one_are_another(start):
    first, second = (
        start(sys.executable, "-c", LAUNCHER, WRAPPED, count=2, world_size=2, **IN_ONE_NODE) for _ in range(2)
    )
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0].tag != second[0].tag
    assert first[0].launcher != second[0].launcher


OWN_LAUNCHER = """
import os, subprocess, sys, time
if "LOCAL_RANK" not in os.environ:
    print("pid", os.getpid(), flush=True)
    subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1", "MASTER_PORT": "29533"})
else:
    print("pid", os.getpid(), flush=True)
time.sleep(60)
"""


@emulated.lacks("proc")
def test_a_program_that_starts_its_other_ranks_itself_is_one_job(start, tmp_path):
    """As Lightning does: its rank 0 has no rank in its environment."""
    (script := tmp_path / "train.py").write_text(OWN_LAUNCHER)
    first, second = (start(sys.executable, str(script), count=2, world_size=2) for _ in range(2))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0].tag != second[0].tag


@emulated.lacks("proc")
def test_a_launcher_that_was_given_a_rank_itself_is_still_the_launcher(start, tmp_path):
    (tmp_path / "torchrun").write_text(LAUNCHER)
    environ = {**IN_ONE_NODE, "RANK": "0"}
    first, second = start(sys.executable, str(tmp_path / "torchrun"), WRAPPED, count=2, world_size=2, **environ)
    assert first == second


@emulated.lacks("proc")
def test_each_single_process_is_a_job_on_each_machine(start, monkeypatch):
    single = [start("sh", "-c", "echo pid $$; exec sleep 60")[0].tag for _ in range(2)]
    boots = []
    for boot in range(50):
        monkeypatch.setattr(jobs, "boot_id", lambda boot=boot: str(boot))
        boots.append(jobs.of(os.getpid(), process_snapshot.take(os.getpid()), 1).tag)
    assert len({*single, *boots}) == 52


@emulated.lacks("proc")
def test_ranks_that_were_started_by_hand_are_one_job_where_they_meet_at_one_place(start):
    one, other = (by_hand(start, rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511") for rank in range(2))
    stranger = by_hand(start, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    assert one.tag == other.tag != stranger.tag
    assert one.launcher != other.launcher
    assert one.is_shared


@emulated.lacks("proc")
@pytest.mark.parametrize(
    "place",
    [
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
        {"PMIX_NAMESPACE": "prterun-node1-77@1"},
        {"TORCHELASTIC_RUN_ID": UUID, **IN_ONE_NODE},
    ],
)
def test_the_ranks_of_a_job_on_several_machines_are_one_job(start, monkeypatch, place):
    tags = []
    for rank in range(2):
        monkeypatch.setattr(jobs, "boot_id", lambda rank=rank: f"machine {rank}")
        tags.append(by_hand(start, rank, **place).tag)
    changed = {name: value.replace("1", "2") for name, value in place.items() if name != "WORLD_SIZE"}
    assert tags[0] == tags[1] != by_hand(start, 0, **{**place, **changed}).tag


@emulated.lacks("proc")
def test_services_of_one_name_in_two_namespaces_of_kubernetes_are_two_places(start):
    place = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    one, other = (by_hand(start, 0, POD_NAMESPACE=name, **place) for name in ("blue", "green"))
    assert one.tag != other.tag


@emulated.lacks("proc")
@pytest.mark.parametrize(("inner", "is_one"), [(1, True), (None, False)])
def test_a_container_of_a_pod_that_is_started_anew_goes_on_with_its_job(start, monkeypatch, inner, is_one):
    read, status = proc.read, proc.status
    monkeypatch.setattr(proc, "read", lambda pid, name, *limit: POD if name == "cgroup" else read(pid, name, *limit))
    monkeypatch.setattr(proc, "status", lambda pid: replace(status(pid), nspid=inner or pid))
    before, after = (start("sh", "-c", "echo pid $$; exec sleep 60")[0] for _ in range(2))
    assert (before.tag == after.tag) == is_one


@emulated.lacks("proc")
def test_a_job_keeps_its_name_whatever_its_environment_says(start):
    job = by_hand(start, 0, MASTER_ADDR="\udcff" * 100_000, MASTER_PORT="1")
    assert len(job.tag) == labels.TAG
    assert len(labels.tagged("x" * 1000, job.tag)) == labels.MAX_RUN


def test_a_process_that_is_gone_has_a_job_too():
    gone = Identity.of_process(1 << 30)
    assert labels.is_called(gone.run, "python")
