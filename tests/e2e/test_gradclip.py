"""Clipping put into a job from outside gives the weights, bit for bit, of clipping written into the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tool, training
from tests.support.tool import Attachment, Page, family_of
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("workloads")]

SMALL = "--steps 12 --width 32 --length 32 --batch 4"
LIMIT = "0.4"
CLIP = f"gradclip:mode=norm,max_norm={LIMIT}"


@pytest.mark.parametrize(
    "arguments",
    ["--groups --accumulate 3 --scaler", *(pytest.param(one, marks=pytest.mark.load) for one in ("", "--amp"))],
)
def test_clipping_by_norm_is_clip_grad_norm_bit_for_bit(arguments):
    unclipped = Job("workloads/charlm.py", f"{SMALL} {arguments}")
    clipped = Job("workloads/charlm.py", f"{SMALL} {arguments} --clip {LIMIT}")
    plain = training.plain_run(clipped)
    with tool.run("-p", CLIP, program=unclipped.command("--pause", "0.05")) as process, Page.below(process) as page:
        assert training.result(process.finish()) == plain.result()
        assert page.values()["hookd_gradclip_clipped"][("norm",)] > 0, "nothing is clipped: the test proves nothing"


@pytest.mark.load
def test_clipping_with_every_observer_on_gives_the_same_weights():
    job = Job("workloads/charlm.py", SMALL)
    expected = training.plain_result(Job("workloads/charlm.py", f"{SMALL} --clip {LIMIT}"))
    plugins = tool.plugin_options(["nan:every=1", "timing", "activations:every=1", CLIP])
    with tool.run(*plugins, program=job.command()) as process:
        assert training.result(process.finish()) == expected


@pytest.mark.load
def test_a_dry_run_measures_and_changes_nothing():
    job = Job("workloads/charlm.py", SMALL)
    options = ("-p", f"{CLIP},dry_run=true")
    with tool.run(*options, program=job.command("--pause", "0.05")) as process, Page.below(process) as page:
        assert training.result(process.finish()) == training.plain_result(job)
        assert page.values()["hookd_gradclip_norm"][()] > float(LIMIT)


@pytest.mark.load
def test_one_of_several_ranks_refuses_to_be_clipped(attachable):
    """Clipping that begins on two ranks at different steps would make their weights differ."""
    job = Job("workloads/ddp.py", "--steps 120 --width 32 --length 32", ranks=2)
    plain = training.plain_run(job)
    with training.start_warm(job, "--pause", "0.15") as process:
        process.expect("^step 5 ")
        rank = str(next(pid for pid in family_of(process.pid) if is_rank(pid)))
        with tool.start_hookd("attach", rank, "--listen", "127.0.0.1:0", "-p", CLIP, "--json") as attach:
            assert attach.wait() not in {0, 3, 4}, attach.describe()
            assert "rank" in "\n".join(attach.out + attach.err)
        with Attachment([int(rank)], "-p", f"{CLIP},dry_run=true") as attachment:
            attachment.detach()
        assert training.result(process.finish()) == plain.result()


def is_rank(pid: int) -> bool:
    return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.load
def test_a_job_of_several_ranks_started_under_run_is_not_clipped():
    job = Job("workloads/ddp.py", "--steps 10 --width 32 --length 32", ranks=2)
    training.plain_run(job)
    with tool.run("-p", CLIP, program=job.command()) as process:
        assert training.result(process.finish()) == training.plain_result(job)
