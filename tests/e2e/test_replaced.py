"""Libraries that replace threads, clocks, sockets and files for the training replace them for nobody else in its process."""

from __future__ import annotations

import os
import signal
import sysconfig
from pathlib import Path

import pytest

from tests.support import tool, training
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e]

PLUGINS = tool.plugin_options(("nan:every=1", "timing", "activations:every=1"))
LIBRARIES = sysconfig.get_path("purelib")


def start(by: str, *, late: bool) -> Process:
    job = Job("replaced.py", f"--pause 0.01 --by {by} --late {int(late)} --libraries {LIBRARIES}")
    return training.start_warm(job)


def blocked(pid: int) -> dict[str, str]:
    """Return the mask of blocked signals of each thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        found[task.name] = status.split("SigBlk:\t")[1].split("\n")[0]
    return found


def stays_as_it_is(process: Process, *, late: bool) -> None:
    """Attach, wait for steps, detach; the threads that existed block the same signals as before, and SIGTERM arrives."""
    pid = process.pid
    process.expect("^ready$")
    before = blocked(pid)
    with tool.Attachment([pid], *PLUGINS) as attachment:

        def total(name: str) -> float:
            return attachment.metrics().total(name)

        wait_until(lambda: total("hookd_steps_total") > 5, what="observed steps")
        if late:
            os.kill(pid, signal.SIGUSR1)
            process.expect("^replaced$")
        done = total("hookd_steps_total")
        wait_until(lambda: total("hookd_steps_total") > done + 20, what="further steps")
        wait_until(lambda: total("hookd_timing_forward_seconds_total") > 0, what="forward seconds")
        observed = blocked(pid)
        assert {task: observed.get(task) for task in before} == before
        attachment.detach()
    assert blocked(pid) == before
    os.kill(pid, signal.SIGTERM)
    process.expect("^checkpoint ")
    process.finish()


@pytest.mark.parametrize(
    "by",
    [
        "gevent",
        *(
            pytest.param(by, marks=pytest.mark.load)
            for by in ("freezegun", "uvloop", "pyfakefs", "eventlet", "time_machine")
        ),
    ],
)
def test_a_training_whose_interpreter_was_replaced(by, attachable):
    with start(by, late=False) as process:
        stays_as_it_is(process, late=False)


@pytest.mark.parametrize(
    "by",
    [
        "pyfakefs",
        *(pytest.param(by, marks=pytest.mark.load) for by in ("gevent", "eventlet", "freezegun", "time_machine")),
    ],
)
def test_a_training_whose_interpreter_is_replaced_while_it_is_watched(by, attachable):
    with start(by, late=True) as process:
        stays_as_it_is(process, late=True)
