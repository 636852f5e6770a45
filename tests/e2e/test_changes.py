"""What changes the training is switched on, changed and switched off while it runs: at one step, on all ranks or none."""

from __future__ import annotations

import re

import pytest

from tests.support import training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process
from tests.support.tool import Attachment, family_of, hookd, hookd_json

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(300)]

CLIPPING = TARGETS / "clipping.py"
STEPS = 600


def clipping(ranks, *schedule, steps=STEPS, pause=0.02):
    command = [bare_python(), CLIPPING, str(ranks), str(steps), str(pause), *schedule]
    return Process(command, env=training.environment(), cwd=TARGETS)


def weights(lines):
    """Give the checksum that each rank has printed."""
    return dict(match.groups() for line in lines if (match := re.match(r"rank (\d+) done (\w+)", line)))


def plainly(ranks, schedule):
    """Run the script with clipping written into it, without hookd."""
    words = [f"{step}:{limit}" for step, limit in schedule.items()]
    with clipping(ranks, *words, pause=0.0) as process:
        return weights(process.finish())


@pytest.fixture
def job(stack, request):
    """A training of one rank or two in its middle, and the pids of the ranks."""
    ranks = getattr(request, "param", 2)
    process = stack.enter_context(clipping(ranks))
    for rank in range(ranks):
        process.expect(f"rank {rank} step 20")
    process.ranks = family_of(process.pid)[1:] if ranks > 1 else [process.pid]
    assert len(process.ranks) == ranks
    return process


def changes(pid):
    """Give the incidents of the changes of a target, by what was done."""
    return [one for one in hookd_json("report", str(pid))["incidents"] if one["kind"] == "training_changed"]


@pytest.mark.parametrize("job", [1, 2], indirect=True)
def test_clipping_switched_on_changed_and_off_gives_the_weights_of_a_script_that_does_it_at_those_steps(job):
    ranks = len(job.ranks)
    with Attachment([job.pid], "--tree", "-p", "gradclip:max_norm=0.5", "-p", "nan", "--timeout", "60"):
        some = str(job.ranks[-1])
        hookd("plugin", "config", some, "gradclip", "max_norm=0.25", "--timeout", "60")
        hookd("plugin", "disable", some, "gradclip", "--timeout", "60")
        told = [changes(pid) for pid in job.ranks]
        steps = [[one["step"] for one in own] for own in told]
        assert steps[0] == steps[-1]
        assert [one["change"] for one in told[0]] == ["load", "configure", "unload"]
        schedule = dict(zip(steps[0], ("0.5", "0.25", "inf"), strict=True))
        assert len(schedule) == 3, "three different steps"
        got = weights(job.finish())
    assert got == plainly(ranks, schedule)
    assert len(got) == ranks
    assert len(set(got.values())) == 1
    assert got != plainly(ranks, {})
