"""`hookd fingerprint` and `hookd diff` on jobs that train: their files, what they say, and that the jobs do not notice."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from itertools import pairwise

import pytest

from hookd.tool.fingerprints import file
from tests.support import tool, training
from tests.support.environment import tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

JOB = Job("transformer.py", "--steps 12")
ENDLESS = Job("transformer.py", "--steps 0 --pause 0.05")
SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
"""


def program(*more):
    return [sys.executable, str(JOB.path), *JOB.arguments.split(), *more]


def test_two_jobs_from_their_first_step_are_equal_and_end_as_without_hookd(tmp_path):
    plain = training.plain_run(JOB)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (a, b):
        with tool.run("--fingerprint", path, program=program()) as process:
            assert process.wait() == 0, process.describe()
            assert tuple(process.out) == plain.result()
    assert list(file.read(a).steps) == list(range(1, 13))
    assert a.stat().st_mode & 0o777 == 0o600
    found = json.loads(tool.hookd("diff", a, b, "--json"))
    assert (found["code"], found["compared"]) == (0, 12)


def test_two_runs_with_other_learning_rates_part_at_the_update(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for rate in ("0.1", "0.2"):
        with tool.run("--fingerprint", tmp_path / rate, program=[sys.executable, script, rate]) as process:
            assert process.wait() == 0, process.describe()
    said = tool.hookd("diff", tmp_path / "0.1", tmp_path / "0.2", status=1)
    assert said.startswith("Equal until the optimizer's update in step 1: lr 0.1 against 0.2.")


def test_a_running_job_is_recorded_beside_the_plugins_that_are_there(tmp_path):
    path = tmp_path / "a.jsonl"
    with training.start_warm(ENDLESS) as process:
        process.expect("^step 3 ")
        with Attachment([process.pid], "-p", "fingerprint:every=7") as attachment:
            reported = tool.hookd_json("fingerprint", str(process.pid), "-o", path, "--steps", "5", "--what", "forward")
            assert (reported["steps"], reported["lost"], reported["is_ended"]) == (5, 0, False)
            refused = json.loads(tool.hookd("fingerprint", str(process.pid), "-o", path, "--json", status=1))
            assert refused["reason"] == "cannot-write"
            (plugin,) = tool.hookd_json("plugin", "list", str(process.pid))["plugins"]
            assert plugin["options"] == {"every": "7"}
            attachment.detach()
        recorded = tool.hookd_json(
            "fingerprint", str(process.pid), "-o", tmp_path / "b.jsonl", "--steps", "3", "--every", "2"
        )
        assert recorded["steps"] == 3
        process.expect("^step .*")
    steps = list(file.read(path).steps)
    assert steps == list(range(steps[0], steps[0] + 5))
    phases = {key.phase for key in file.read(path).steps[steps[-1]].entries}
    assert phases == {"random", "data", "forward", "loss"}
    numbers = list(file.read(tmp_path / "b.jsonl").steps)
    assert [b - a for a, b in pairwise(numbers)] == [2, 2]


def test_of_a_job_that_is_killed_everything_up_to_its_last_step_is_there(tmp_path):
    path = tmp_path / "a.jsonl"
    with (
        training.start_warm(ENDLESS) as process,
        tool.start_hookd("fingerprint", str(process.pid), "-o", path, "--json") as recording,
    ):
        recording.expect("recording process")
        wait_until(lambda: path.exists() and len(file.read(path).steps) >= 5, what="five steps")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert recording.wait() == 0, recording.describe()
    printed = int(process.out[-1].split()[1])
    reported = json.loads("\n".join(recording.out))
    assert reported["is_ended"]
    assert reported["steps"] == len(file.read(path).steps)
    assert reported["last"] >= printed - 1


def test_a_recording_ends_when_hookd_is_detached(tmp_path):
    with (
        training.start_warm(ENDLESS) as process,
        tool.start_hookd("fingerprint", str(process.pid), "-o", tmp_path / "a", "--json") as recording,
    ):
        recording.expect("recording process")
        tool.hookd("detach", str(process.pid))
        assert recording.wait() == 0, recording.describe()
        assert json.loads("\n".join(recording.out))["is_detached"]
        process.expect("^step .*", after=len(process.out))


def test_a_command_is_not_started_if_its_fingerprint_cannot_be_written(tmp_path):
    (tmp_path / "a").write_text("")
    with tool.run("--fingerprint", tmp_path / "a", program=program()) as process:
        assert process.wait() == 1, process.describe()
    assert process.out == []
    assert any("it exists" in line for line in process.err)


def test_a_command_that_is_run_twice_ends_with_hookd_and_leaves_nothing(tmp_path):
    sleeping = "import time; print('begins', flush=True); time.sleep(600)"
    words = ("fingerprint", "--twice", "--", sys.executable, "-c", sleeping)
    with tool.start_hookd(*words, TMPDIR=tmp_path) as process:
        process.expect("begins")
        assert list(tmp_path.iterdir())
        process.signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM, process.describe()
    assert not list(tmp_path.iterdir())


def test_both_runs_read_the_same_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("sys.argv[1]", "sys.stdin.read()"))
    (tmp_path / "rate").write_text("0.1")
    words = shlex.join([*tool.HOOKD, "fingerprint", "--twice", "--json", "--", sys.executable, str(script)])
    with Process(["sh", "-c", f"exec {words} < {tmp_path / 'rate'}"], env=tool_environment()) as process:
        assert process.wait() == 0, process.describe()
    (found,) = json.loads("\n".join(process.out))
    assert (found["code"], found["compared"]) == (0, 3)


def test_a_command_is_run_twice_and_said_to_compute_the_same():
    (found,) = json.loads(tool.hookd("fingerprint", "--twice", "--json", "--", *program()))
    assert (found["code"], found["compared"]) == (0, 12)
