"""Plugins that change the training are loaded, configured and unloaded while it runs: at one step, on all ranks or none."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest

from tests.support import forked, training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, family_of, hookd, hookd_json, start_hookd

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(600)]

CLIPPING = TARGETS / "clipping.py"
PATIENT = ("--timeout", "60")
CLIP = ("-p", "gradclip:max_norm=0.5")


def clipping(ranks, steps, pause, *schedule, **extra):
    command = [bare_python(), CLIPPING, str(ranks), str(steps), str(pause), *schedule]
    return Process(command, env=training.environment(**extra), cwd=TARGETS, popen=forked.start)


class Job:
    """A running training of one rank or two."""

    def __init__(self, stack, stop, ranks, extra):
        self._stop = stop
        self.process = stack.enter_context(clipping(ranks, stop, 0.01, **extra))
        for rank in range(ranks):
            self.process.expect(f"rank {rank} step 20", timeout_s=300)
        self.pids = family_of(self.process.pid)[1:] if ranks > 1 else [self.process.pid]
        assert len(self.pids) == ranks

    def expect_more(self):
        """Wait until all ranks have taken another step."""
        before = len(self.process.out)
        for rank in range(len(self.pids)):
            self.process.expect(f"rank {rank} step", after=before)

    def end(self):
        """End the job; return its number of steps and the checksum of each rank."""
        self._stop.touch()
        return results(self.process.finish())


def results(lines):
    found = dict(match.groups() for line in lines if (match := re.match(r"rank (\d+) done (\w+)", line)))
    steps = {match[1] for line in lines if (match := re.match(r"rank \d+ over (\d+)", line))}
    assert len(steps) == 1, steps
    return steps.pop(), found


def plainly(ranks, steps, schedule, **extra):
    """Run the script with clipping built into it, without hookd."""
    with clipping(ranks, steps, 0.0, *(f"{step}:{limit}" for step, limit in schedule.items()), **extra) as process:
        return results(process.finish())[1]


@pytest.fixture
def start(stack, tmp_path):
    return lambda ranks=2, **extra: Job(stack, tmp_path / "stop", ranks, extra)


def changes(job):
    """Return for each rank the incidents about changes of the training."""
    reports = [hookd_json("report", str(pid))["incidents"] for pid in job.pids]
    return [[one for one in incidents if one["kind"] == "training_changed"] for incidents in reports]


def clipped(pid):
    return hookd_json("report", pid)["metrics"]["gradclip"]["clipped"][0]["value"]


def refused(*arguments):
    """Run a command that fails; return its messages."""
    with start_hookd(*arguments) as process:
        assert process.wait() in {1, 2}, process.describe()
        return "\n".join(process.err)


@pytest.mark.parametrize(
    ("ranks", "extra"), [(1, {}), (2, {}), (2, {"FULLY_SHARD": "1"})], ids=["one-rank", "two-ranks", "sharded"]
)
@pytest.mark.load
def test_switched_on_changed_and_off_it_gives_the_weights_of_a_script_that_does_so_at_those_steps(start, ranks, extra):
    job = start(ranks, **extra)
    some = str(job.pids[-1])
    with Attachment([job.process.pid], "--tree", *CLIP, "-p", "nan", *PATIENT):
        job.expect_more()
        assert "positive and finite max_norm" in refused("plugin", "config", some, "gradclip", "max_norm=-1")
        hookd("plugin", "config", some, "gradclip", "max_norm=0.25", *PATIENT)
        job.expect_more()
        assert clipped(some) > 0, "nothing is clipped: the test proves nothing"
        hookd("plugin", "disable", some, "gradclip", *PATIENT)
        reported = changes(job)
        steps, got = job.end()
    assert [one["change"] for one in reported[0]] == ["load", "configure", "unload"]
    begun = [one["step"] for one in reported[0]]
    assert all([one["step"] for one in own] == begun for own in reported), "all ranks at the same steps"
    assert begun == sorted(set(begun))
    assert all(one["is_step_absolute"] for one in reported[0])
    assert [one["options"].get("max_norm") for one in reported[0]] == ["0.5", "0.25", None]
    assert len(got) == ranks
    assert len(set(got.values())) == 1
    assert got == plainly(ranks, steps, dict(zip(begun, ("0.5", "0.25", "inf"), strict=True)), **extra)


@pytest.mark.load
def test_it_is_refused_on_one_of_two_ranks_and_while_one_does_not_answer(start):
    job = start()
    first, second = map(str, job.pids)
    with Attachment([job.pids[0]], "-p", "nan", *PATIENT):
        assert "attached to 1 of them" in refused("plugin", "enable", first, "gradclip", "max_norm=0.5")
        assert "attached to 1 of them" not in refused("plugin", "disable", first, "gradclip"), "it is not loaded"
        with Attachment([job.pids[1]], "-p", "nan", *PATIENT):
            job.process.expect("rank 1 step", after=len(job.process.out))
            stopped = job.pids[1]
            os.kill(stopped, signal.SIGSTOP)
            try:
                said = refused("plugin", "enable", first, "gradclip", "max_norm=0.5")
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert f"rank {_rank(second)} (process {second})" in said
            assert "no rank is changed" in said
            job.expect_more()
            assert changes(job) == [[], []]
            assert [_plugins(pid) for pid in job.pids] == [["nan"], ["nan"]]
            steps, got = job.end()
    assert got == plainly(2, steps, {})


def _rank(pid):
    return hookd_json("report", pid)["identity"]["rank"]


def _plugins(pid):
    return [one["name"] for one in hookd_json("report", str(pid))["plugins"]]


@pytest.mark.load
def test_detaching_from_one_rank_ends_it_on_all_of_them_at_one_step(start):
    job = start()
    with Attachment([job.process.pid], "--tree", *CLIP, "-p", "nan", *PATIENT):
        job.expect_more()
        other = job.pids[0]
        hookd("detach", str(job.pids[1]), "--timeout", "30")

        def ended():
            incidents = hookd_json("report", str(other))["incidents"]
            return [one["step"] for one in incidents if one["kind"] == "training_changed" and one["change"] == "end"]

        (end,) = wait_until(ended, what="the end of the clipping")
        incidents = hookd_json("report", str(other))["incidents"]
        (begun,) = [one["step"] for one in incidents if one.get("change") == "load"]
        steps, got = job.end()
    assert len(set(got.values())) == 1
    assert got == plainly(2, steps, {begun: "0.5", end: "inf"})


FAILS = """
from hookd import Plugin, hookimpl

class Fails(Plugin):
    name = "fails"
    mutates = True

    @hookimpl
    def configure(self, context):
        self.context, self.calls = context, 0

    @hookimpl
    def step_pre(self, optimizer):
        self.calls += 1
        if self.context.rank == 1 and self.calls == 5:
            raise ValueError("on this rank alone")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
"""


def test_an_error_on_one_rank_ends_it_on_all_and_says_which_step_differs(start, tmp_path):
    (tmp_path / "fails.py").write_text(textwrap.dedent(FAILS))
    job = start()
    with Attachment([job.process.pid], "--tree", "-p", "fails", "--plugin-dir", tmp_path, *PATIENT) as attachment:
        wait_until(lambda: attachment.metrics().total("hookd_plugin_changes_training", plugin="fails") == 0)
        wait_until(lambda: all(own[-1]["change"] == "end" for own in changes(job) if own[1:]))
        reported = {_rank(str(pid)): own for pid, own in zip(job.pids, changes(job), strict=True)}
        states = attachment.metrics()
        assert states.total("hookd_plugin_state", plugin="fails", state="quarantined", rank="1") == 1
        assert states.total("hookd_plugin_state", plugin="fails", state="disabled", rank="0") == 1
        (end,) = [one for one in reported[0] if one["change"] == "end"]
        assert end["by_rank"] == 1
        assert "ended on rank 1" in end["message"]
        # The failing step is the fifth. Either rank 0 has taken it already, and its weights differ; or not, and they agree.
        assert end["step"] - reported[0][0]["step"] == (5 if end["differs"] else 4)
        _, got = job.end()
    assert (len(set(got.values())) == 2) is end["differs"]


SCALES = """
from hookd import Plugin, hookimpl

class Scales(Plugin):
    name = "scales"
    mutates = True

    @hookimpl
    def configure(self, context):
        self.steps = context.counter("steps", "Steps.", ["factor"])

    @hookimpl
    def step_pre(self, optimizer):
        self.steps.labels("{factor}").inc()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_({factor})
"""


@pytest.mark.load
@pytest.mark.parametrize("ranks", [1, 2])
def test_its_new_source_begins_at_one_step_on_all_ranks(start, tmp_path, ranks):
    (tmp_path / "scales.py").write_text(SCALES.format(factor=0.5))
    job = start(ranks)
    some = str(job.pids[-1])
    where = ("--plugin-dir", tmp_path)
    with Attachment([job.process.pid], "--tree", "-p", "scales", *where, *PATIENT):
        job.expect_more()
        (tmp_path / "scales.py").write_text(SCALES.format(factor=0.25))
        hookd("plugin", "reload", some, "scales", *where, *PATIENT)
        job.expect_more()
        reported = changes(job)
        steps = [hookd_json("report", str(pid))["metrics"]["scales"]["steps"] for pid in job.pids]
        _, got = job.end()
    assert [[one["change"] for one in own] for own in reported] == [["load", "reload"]] * ranks
    assert len({own[1]["step"] for own in reported}) == 1, "all ranks at the same step"
    assert all({one["factor"] for one in own} == {"0.25", "0.5"} for own in steps), "the counter continues"
    assert len(set(got.values())) == 1, "the ranks have the same weights"
