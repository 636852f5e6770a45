"""The policies of `nan` on two ranks: both do the same, though the batch of one alone was bad."""

from __future__ import annotations

import re

import pytest

from tests.support import forked, training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, family_of, hookd, hookd_json

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(600)]

PATIENT = ("--timeout", "60")


@pytest.fixture
def job(stack, tmp_path):
    command = [bare_python(), TARGETS / "nan_skip.py", tmp_path / "poison", tmp_path / "stop"]
    process = stack.enter_context(Process(command, env=training.environment(), cwd=TARGETS, popen=forked.start))
    for rank in (0, 1):
        process.expect(f"rank {rank} step 10", timeout_s=300)
    return process


def incidents(pid, kind):
    return [one for one in hookd_json("report", str(pid))["incidents"] if one["kind"] == kind]


def said(process, pattern):
    return [match.groups() for line in process.out if (match := re.match(pattern, line))]


@pytest.mark.load
def test_both_ranks_skip_the_same_step_and_end_with_the_same_weights(job, tmp_path):
    with Attachment([job.pid], "--tree", "-p", "nan:policy=skip", *PATIENT):
        (tmp_path / "poison").touch()
        for rank in (0, 1):
            job.expect(f"rank {rank} still", timeout_s=120)
        (tmp_path / "stop").touch()
        job.finish()
    (first, at), (second, also_at) = sorted(said(job, r"rank (\d) still (\d+)"))
    assert (first, second, at) == ("0", "1", also_at)
    (_, finite, digest), (_, also_finite, also_digest) = sorted(said(job, r"rank (\d) finite (\w+) (\w+)"))
    assert (finite, also_finite) == ("True", "True")
    assert digest == also_digest


@pytest.mark.load
def test_a_paused_job_goes_on_after_the_policy_was_changed_and_ends_as_without_hookd(job, tmp_path):
    with Attachment([job.pid], "--tree", "-p", "nan:policy=pause", *PATIENT):
        pids = family_of(job.pid)[1:]
        (tmp_path / "poison").touch()
        paused = wait_until(lambda: [pid for pid in pids if incidents(pid, "paused")], what="the pause")
        hookd("plugin", "config", str(paused[0]), "nan", "policy=report", *PATIENT)
        seen = len(job.out)
        for rank in (0, 1):
            job.expect(f"rank {rank} step", after=seen)
        (tmp_path / "stop").touch()
        job.finish()
    (_, finite, digest), (_, also_finite, also_digest) = sorted(said(job, r"rank (\d) finite (\w+) (\w+)"))
    assert (finite, also_finite) == ("False", "False"), "nothing was skipped"
    assert digest == also_digest
