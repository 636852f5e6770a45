"""A program that closes all descriptors but its own, and takes their numbers: hookd closes none of those."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import tool, training
from tests.support.processes import wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e]

PLUGINS = tool.plugin_options(("nan:every=1", "timing", "memory"))


def threads_of_ours(pid: int) -> list[str]:
    names = [one.read_text().strip() for one in Path(f"/proc/{pid}/task").glob("*/comm")]
    return [name for name in names if name == "hookd"]


@pytest.mark.parametrize("below", [256, pytest.param(1100, marks=pytest.mark.load)])
def test_a_training_that_closes_all_descriptors(below, attachable):
    # Not in a fork: objects of the fork server would close numbers of theirs.
    with training.start_warm(Job("closing.py", f"--pause 0.01 --to {below}")) as process:
        process.expect("^ready$")
        with tool.Attachment([process.pid], *PLUGINS) as attachment:
            total = lambda: attachment.metrics().total("hookd_steps_total")  # noqa: E731
            wait_until(lambda: total() > 5, what="observed steps")
            os.kill(process.pid, signal.SIGUSR1)
            process.expect("^closed$")
            if below == 256:  # ours are above
                done = total()
                wait_until(lambda: total() > done + 20, what="further steps")
                attachment.detach()
            else:  # nobody can reach the agent any more: it leaves, and this is reported
                attachment.process.expect("still runs, but has closed hookd's descriptors|was detached$")
            wait_until(lambda: not threads_of_ours(process.pid), what="the agent's leaving")
        if below > 256:
            with tool.Attachment([process.pid], *PLUGINS) as again:
                wait_until(lambda: again.metrics().total("hookd_steps_total") > 5, what="observed steps")
                again.detach()
        os.kill(process.pid, signal.SIGTERM)
        process.expect(f"^written {below - 3} ")
        process.finish()
