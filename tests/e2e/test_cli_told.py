"""What a person is told who never asks twice: while it happens, when it is paused, and when it has ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.environment import REPOSITORY, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, hookd_json

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN = REPOSITORY / "examples" / "train.py"

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]


@pytest.fixture
def training() -> Iterator[Process]:
    """The example, which puts a NaN into one layer for one step at SIGUSR1."""
    with Process([bare_python(), TRAIN], env=target_environment()) as process:
        process.expect(r"^step 3 ")
        yield process


def attached(process: Process, *words: str, **variables: str) -> Attachment:
    watching = Attachment([process.pid], *words, **variables)
    watching.process.expect(rf"^attached to {process.pid} ")
    return watching


def steps(process: Process) -> int:
    return int(hookd_json("report", str(process.pid))["step"]["counted"])


def row_of(process: Process) -> dict[str, Any]:
    return next(row for row in hookd_json("status")["targets"] if row["pid"] == process.pid)


def test_the_terminal_of_an_attach_says_when_a_nan_is_born(training):
    with attached(training, "-p", "nan:every=1", "--json") as watching:
        wait_until(lambda: steps(training) > 40, what="a model that hookd has learnt")
        training.signal(signal.SIGUSR1)
        fault = training.expect(r"^fault in (\S+) at step (\d+)$")
        line = watching.process.expect(rf"^hookd: nan in process {training.pid} \(run train\.py, rank 0\) at step .*")
        assert f"{fault[1]} output" in line.group()
        assert line.group() in watching.process.err
        watching.detach()
