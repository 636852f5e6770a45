"""`hookd attach` on running training jobs of every kind, in mid-training and in an environment without hookd.

Each job runs once plainly (forked where torch is there already, see tests/support/forkserver.py) and once with all
observers attached after some steps and detached before the end: every module that it calls has metrics within 5 s, and all
losses and the closing checksum are the same, bit for bit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import tool, training
from tests.support.processes import wait_until
from tests.support.tool import Attachment, Metrics, family_of, plugin_options
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

OBSERVERS = ("nan:every=1", "timing", "activations:every=1", "everything:every=1")
PLUGINS = [*plugin_options(OBSERVERS), "--plugin-dir", Path(__file__).parent / "plugins"]
EVERY_SERIES = {"HOOKD_DETAIL": "all"}
ROOT = frozenset(["(root)"])
SMALL = "--width 32 --batch 4 --length 32"
MOST_STEPS = 40
"""Within this many steps after an attach every module is known."""

OWN = [
    Job("mlp.py", "--steps 160"),
    Job("amp.py", "--steps 160"),
]
MORE = [
    Job("checkpointed.py", "--steps 160 --kind reentrant"),
    Job("threads.py", "--steps 160"),
    Job("compiled.py", "--steps 60"),
    Job("convnet.py", "--steps 160"),
    Job("checkpointed.py", "--steps 160 --kind selective"),
    Job("workers.py", "--steps 160"),
    Job("mlp.py", "--steps 160 --accumulate 3"),
    Job("transformer.py", "--steps 160"),
    Job("checkpointed.py", "--steps 160 --kind nonreentrant"),
]
"""Another of our jobs, or a workload, covers the same."""
ALIKE_UNDER_RUN = [
    *MORE,
    Job("mlp.py", "--steps 160"),
]
"""An attach in mid-training shows how the agent treats them; a start under `hookd run` is like that of the others."""
SHARED = [Job("workloads/charlm.py", f"--steps 60 {SMALL} --scaler --clip 0.5")]
LOADER = [Job("workloads/loader.py", "--steps 110 --start fork --ema")]
LIKE_OWN = [
    Job("workloads/convnet.py", "--steps 60 --batch 8"),
    Job("workloads/faults.py", "--steps 60 --fault none"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL}"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL} --amp"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL} --compile --layers 1"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL} --checkpoint reentrant"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL} --checkpoint nonreentrant"),
    Job("workloads/charlm.py", f"--steps 60 {SMALL} --accumulate 4"),
    Job("workloads/loader.py", "--steps 110 --start fork"),
    Job("workloads/loader.py", "--steps 110 --start spawn"),
    Job("workloads/loader.py", "--steps 110 --start forkserver"),
]
"""Another of our jobs, or another of these, covers the same."""
DDP = Job("workloads/ddp.py", f"--steps 150 {SMALL}", ranks=2)


@pytest.mark.parametrize(
    "job", [pytest.param(job, marks=[pytest.mark.load] * (job.script == "amp.py")) for job in OWN], ids=str
)
def test_attach_and_detach_leave_a_job_of_ours_bit_identical(job, tmp_path):
    attach_in_mid_training(job, tmp_path)


@pytest.mark.load  # tests/e2e/test_faults.py has one with a scaler
@pytest.mark.parametrize("job", [job for job in OWN if job not in ALIKE_UNDER_RUN], ids=str)
def test_a_job_of_ours_started_under_run_is_bit_identical(job):
    started_under_run(job)


@pytest.mark.load
@pytest.mark.parametrize("job", ALIKE_UNDER_RUN, ids=str)
def test_more_jobs_of_ours_started_under_run_are_bit_identical(job):
    started_under_run(job)


def started_under_run(job: Job) -> None:
    training.plain_run(job)
    with tool.run(*PLUGINS, program=job.command()) as process:
        assert training.result(process.finish()) == training.plain_result(job)


@pytest.mark.load
@pytest.mark.parametrize("job", SHARED, ids=str)
def test_attach_and_detach_leave_a_workload_bit_identical(job, workloads, tmp_path):
    attach_in_mid_training(job, tmp_path)


@pytest.mark.load
@pytest.mark.parametrize("job", LOADER, ids=str)
def test_attach_and_detach_leave_a_workload_with_workers_bit_identical(job, workloads, tmp_path):
    attach_in_mid_training(job, tmp_path)


@pytest.mark.load
@pytest.mark.parametrize("job", MORE, ids=str)
def test_attach_and_detach_leave_more_jobs_of_ours_bit_identical(job, tmp_path):
    attach_in_mid_training(job, tmp_path)


@pytest.mark.load
@pytest.mark.parametrize("job", LIKE_OWN, ids=str)
def test_attach_and_detach_leave_more_workloads_bit_identical(job, workloads, tmp_path):
    attach_in_mid_training(job, tmp_path)


def test_attach_and_detach_leave_both_ranks_of_a_distributed_job_bit_identical(workloads):
    plain = training.plain_run(DDP)
    names = training.called_modules("workloads/charlm.py", SMALL)
    with training.start(DDP, "--pause", "0.08") as process:
        process.expect("^step 5 ")
        ranks = [pid for pid in family_of(process.pid) if is_worker(pid)]
        assert len(ranks) == 2
        with Attachment(ranks, *PLUGINS, **EVERY_SERIES) as attachment:
            metrics = everything_within_a_few_steps(attachment, names)
            assert metrics.labels("hookd_steps_total", "rank") == {"0", "1"}
            for rank in ("0", "1"):
                wait_until(lambda rank=rank: modules_of(attachment.metrics(), rank=rank) >= names, what=f"rank {rank}")
            attachment.detach()
        assert training.result(process.finish()) == plain.result()


def is_worker(pid: int) -> bool:
    """Return whether this is the script itself, not the torchrun that started it."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return not any(b"torch.distributed.run" in word for word in command) and any(b"ddp.py" in word for word in command)


def attach_in_mid_training(job: Job, folder: Path) -> None:
    is_compiled = "compile" in str(job)
    plain = training.plain_run(job)
    if is_compiled:
        plain.result()  # its compiled code is cached for the other run
    names = ROOT if is_compiled else training.called_modules(job.script, SMALL * ("charlm" in job.script))
    # Ours take their time until the detach is done. A workload's attach is over well before a new epoch, whose workers keep the
    # loader's training waiting for seconds.
    hurry, is_ours = folder / "hurry", not job.script.startswith("workloads/")
    pace = (
        ["--pause", "0.25", "--hurry", str(hurry)]
        if is_ours
        else ["--pause", "0.2" if "loader" in job.script else "0.25"]
    )
    with training.start_warm(job, *pace) as process:
        process.expect("^step 5 ")
        with Attachment([process.pid], *PLUGINS, **EVERY_SERIES) as attachment:
            metrics = everything_within_a_few_steps(attachment, names)
            assert metrics.total("hookd_target_up") == 1
            if is_compiled:
                assert metrics.total("hookd_modules", state="compiled") >= 1, "what is not seen must be said"
            if ("charlm" not in job.arguments and "workers" in job.script) or "loader" in job.script:
                observe_a_new_epoch(process, attachment)
            attachment.detach()
        observed_until = len(process.out)
        hurry.touch()
        lines = process.finish()
        assert training.result(lines) == plain.result()
        assert len(lines) > observed_until, "the job had ended before the detach: the test proves too little"


def everything_within_a_few_steps(attachment: Attachment, names: frozenset[str]) -> Metrics:
    """Wait for the metrics of every module and of some steps, and check that no plugin has had an error."""
    metrics = wait_until(
        lambda: modules_of(now := attachment.metrics()) >= names and now,
        what=lambda: f"{names - modules_of(attachment.metrics())}",
    )
    assert max(steps.value for steps in metrics.select("hookd_steps_total")) <= MOST_STEPS
    wait_until(
        lambda: not missing(attachment.metrics()), what=lambda: f"of everything: {missing(attachment.metrics())}"
    )
    metrics = attachment.metrics()
    assert metrics.total("hookd_plugin_errors_total") == 0, attachment.process.describe()
    assert {s.labels["state"] for s in metrics.select("hookd_plugin_state") if s.value} == {"active"}
    return metrics


def missing(metrics: Metrics) -> list[str]:
    """Return what all observers together should have published after a few steps, but have not."""
    seen = {
        "steps": metrics.total("hookd_steps_total") >= 2,
        "activations": metrics.select("hookd_activations_mean"),
        "backward times": metrics.total("hookd_timing_backward_seconds_total") > 0,
        "gradients": metrics.total("hookd_everything_events_total", event="param_grad") > 0,
    }
    return [what for what, is_seen in seen.items() if not is_seen]


def modules_of(metrics: Metrics, **labels: str) -> set[str]:
    """Return the names of the modules that were called, those of a second root like those of the first."""
    called = [s for s in metrics.select("hookd_timing_forward_calls_total", **labels) if s.value]
    return {re.sub(r"^#\d+\.", "", re.sub(r"^#\d+$", "(root)", s.labels["module"])) for s in called}


def observe_a_new_epoch(process: training.Process, attachment: Attachment) -> None:
    """Wait until the observed process has started new DataLoader workers, and check that they are silent."""
    step = int(process.out[-1].split()[1])
    every = 10 if "workers.py" in " ".join(process.command) else 50
    process.expect(f"^step {(step // every + 1) * every + 2} ")
    assert attachment.metrics().total("hookd_target_up") == 1
