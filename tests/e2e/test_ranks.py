"""`hookd attach --tree` and `--match`: every rank of a launcher, nothing else, and a message about those left out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request

import psutil
import pytest

from hookd.tool.attach import discover
from tests.support import training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import Metrics, hookd, hookd_json, script_of, start_hookd

pytestmark = [pytest.mark.usefixtures("attachable")]

RANKS = TARGETS / "ranks.py"
OTHER_PYTHON = os.environ.get("HOOKD_TEST_LAUNCHERS_PYTHON", "")
"""An interpreter that has torch and, as far as they are to be tested, accelerate and ray."""


@pytest.fixture
def launch(stack):
    """Start a job, wait until both ranks have trained a step, and end all of its processes at the end."""

    def start(*command, **extra):
        process = stack.enter_context(Process(command, env=training.environment(**extra), cwd=TARGETS))
        stack.callback(_end, process.pid)
        for rank in (0, 1):
            process.expect(f"rank {rank} trains", timeout_s=120)
        return process

    return start


def _end(pid):
    family = _family(pid)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, 30)


def _family(pid):
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def attached(*arguments):
    """Attach in the foreground; yield the JSON output, and the process."""
    with start_hookd("attach", *arguments, "--listen", "127.0.0.1:0", "--json", "--timeout", "60") as process:
        wait_until(lambda: process.out and process.out[-1] == "}", 120, process.describe)
        yield json.loads("\n".join(process.out)), process
        process.signal(signal.SIGINT)
        assert process.wait() == 0, process.describe()


def metrics_of(answer):
    with urllib.request.urlopen(answer["metrics"], timeout=60) as page:
        return Metrics(page.read().decode())


def ranks_of(answer):
    """Return the ranks of a job, each with the script that its run is called by."""
    assert len({target["run"] for target in answer["targets"]}) == 1
    return sorted((script_of(target["run"]), target["rank"]) for target in answer["targets"])


def whys(answer):
    return sorted(one["why"] for one in answer["skipped"])


WORKER = "a data loader's worker"
LAUNCHER = "a launcher of training processes"
SERVER = "multiprocessing's fork server"
TRACKER = "multiprocessing's resource tracker"


@pytest.mark.parametrize(
    ("method", "others"),
    [
        pytest.param("spawn", [TRACKER], marks=pytest.mark.load),
        pytest.param("fork", [], marks=pytest.mark.load),
        ("forkserver", [SERVER, TRACKER]),  # which has all that the others have
    ],
)
@pytest.mark.load
def test_the_ranks_of_multiprocessing_are_attached_and_their_helpers_are_not(launch, method, others):
    job = launch(bare_python(), RANKS, method)
    with attached("--tree", str(job.pid)) as (answer, tool):
        assert ranks_of(answer) == [("ranks.py", "0"), ("ranks.py", "1")]
        assert whys(answer) == sorted([LAUNCHER, WORKER, WORKER, *others])
        tool.expect(rf"^skipped {job.pid}: {LAUNCHER}$")
        wait_until(lambda: len(metrics_of(answer).labels("hookd_steps_total", "rank", run="ranks.py")) == 2)
    assert not [one.pid for one in _family(job.pid) if discover.holds_page(one.pid)]


def test_the_ranks_of_torchrun_are_attached_at_once(launch):
    job = launch(bare_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS, "rank")
    with attached("--tree", str(job.pid)) as (answer, _):
        assert ranks_of(answer) == [("ranks.py", "0"), ("ranks.py", "1")]
        assert whys(answer) == sorted([LAUNCHER, WORKER, WORKER])
        rows = {row["pid"]: row["launcher"] for row in hookd_json("ps")["processes"]}
        assert [rows[entry["pid"]] for entry in answer["targets"]] == [job.pid] * 2
        assert f"a rank of {job.pid} (--tree)" in hookd("ps")


@pytest.mark.load
def test_a_launcher_of_any_kind_will_do(launch, tmp_path):
    """A shell script that starts the ranks in the background, as many clusters have one."""
    script = tmp_path / "job.sh"
    store = tmp_path / "store"
    script.write_text(
        f"for rank in 0 1; do RANK=$rank WORLD_SIZE=2 {bare_python()} {RANKS} rank {store} & done\nwait\n"
    )
    job = launch("sh", script)
    with attached("--tree", str(job.pid), "--match", f"*{store}*") as (answer, _):
        assert ranks_of(answer) == [("ranks.py", "0"), ("ranks.py", "1")]
        assert whys(answer) == [WORKER, WORKER]


@pytest.mark.load
def test_processes_that_have_renamed_themselves_are_found_by_match(launch, tmp_path):
    """Like Ray's workers: their command line is a title, their parent is gone, and they have torch."""
    title = f"title::{tmp_path.name}-{os.getpid()}"
    job = launch("sh", "-c", f"for rank in 0 1; do RANK=$rank WORLD_SIZE=2 EXEC_TITLE={title} "
                 f"{bare_python()} {RANKS} rank {tmp_path / 'store'} & done; wait")  # fmt: skip
    with attached("--match", title) as (answer, _):
        assert [rank for _, rank in ranks_of(answer)] == ["0", "1"]
    assert job.popen.poll() is None


def _has(module):
    if not OTHER_PYTHON:
        return False
    done = subprocess.run([OTHER_PYTHON, "-c", f"import {module}"], capture_output=True, timeout=120, check=False)
    return done.returncode == 0


def _needs(module):
    return pytest.mark.skipif(
        not _has(module), reason=f"HOOKD_TEST_LAUNCHERS_PYTHON names no interpreter that has torch and {module}"
    )


@_needs("accelerate")
def test_the_ranks_of_accelerate_are_attached(launch):
    """Its way for several GPUs is the one that starts several processes on one node; the script needs none of them."""
    words = ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    command = (OTHER_PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", *words)
    job = launch(*command, RANKS, "rank")
    with attached("--tree", str(job.pid)) as (answer, _):
        assert ranks_of(answer) == [("ranks.py", "0"), ("ranks.py", "1")]
        assert LAUNCHER in whys(answer)


@_needs("ray")
def test_the_workers_of_ray_train_are_attached_by_match(launch):
    """Their parent is gone, and their command line is `ray::…`."""
    launch(OTHER_PYTHON, TARGETS / "ray_train.py", RAY_TRAIN_V2_ENABLED="1")
    with attached("--match", "ray::*TrainWorker*") as (answer, _):
        assert sorted(target["rank"] for target in answer["targets"]) == ["0", "1"]
        wait_until(lambda: len(metrics_of(answer).labels("hookd_steps_total", "rank")) == 2, what="steps of both ranks")
