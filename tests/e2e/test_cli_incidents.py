"""Messages to a person who never asks twice: while something happens, when the training is paused, and at the end."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import forked
from tests.support.environment import REPOSITORY, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, hookd, hookd_json, run
from tests.support.training import paced_example

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN = REPOSITORY / "examples" / "train.py"

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]


@pytest.fixture
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The example training, which puts a NaN into one layer for one step at SIGUSR1."""
    command = [bare_python(), paced_example(tmp_path_factory.mktemp("example"))]
    with Process(command, env=target_environment(), popen=forked.start) as process:
        process.expect(r"^step 3 ")
        yield process


def attached(process: Process, *words: str, **variables: str) -> Attachment:
    watching = Attachment([process.pid], *words, **variables)
    watching.process.expect(rf"^attached to {process.pid} ")
    return watching


def steps(process: Process) -> int:
    return int(hookd_json("report", str(process.pid))["step"]["counted"])


def nan_of(pid: str) -> dict[str, Any]:
    return next(row for row in hookd_json("plugin", "list", pid)["plugins"] if row["name"] == "nan")


def row_of(process: Process) -> dict[str, Any]:
    return next(row for row in hookd_json("status")["targets"] if row["pid"] == process.pid)


@pytest.mark.load
def test_the_terminal_of_an_attach_says_when_a_nan_is_born(training):
    with attached(training, "-p", "nan:every=1", "--json") as watching:
        wait_until(lambda: steps(training) > 40, what="a model that hookd has learnt")
        training.signal(signal.SIGUSR1)
        fault = training.expect(r"^fault in (\S+) at step (\d+)$")
        line = watching.process.expect(
            rf"^hookd: nan in process {training.pid} of user \S+ \(run train\.py@\w+, rank 0\): first .*"
        )
        assert f"{fault[1]} output" in line.group()
        assert line.group() in watching.process.err
        watching.detach()


@pytest.mark.load
def test_the_terminal_of_a_run_says_so_too():
    program = [bare_python(), TRAIN, "--steps", "150", "--nan-at", "30"]
    with run("-p", "nan:every=1", "--listen", "127.0.0.1:0", program=program) as process:
        line = process.expect(
            r"^hookd: nan in process \d+ of user \S+ \(run train\.py@\w+, rank 0\): first NaN: .* at step 30, exact"
        )
        assert line.string in process.err
        process.finish()


@pytest.mark.load
def test_a_paused_training_is_called_so_and_goes_on_as_is_said(training):
    pid = str(training.pid)
    with attached(training, "-p", "nan:every=1,policy=pause") as watching:
        assert row_of(training)["state"] == "running"
        training.signal(signal.SIGUSR1)
        wait_until(lambda: row_of(training)["state"] == "paused", what="the pause")
        reported = f"it goes on after `hookd plugin config {pid} nan policy=report`"
        assert reported in " ".join(hookd("status", COLUMNS="400").split("\n"))
        assert reported in hookd("report", pid, COLUMNS="400")
        assert "first NaN" in hookd("status", COLUMNS="400")

        assert re.search(
            r"^nan +[\d.]+ +active +0 .* every=1 policy=pause +.*recorder=20",
            hookd("plugin", "list", pid, COLUMNS="400"),
            re.MULTILINE,
        )
        before = len(training.out)
        hookd("plugin", "config", pid, "nan", "policy=report")
        training.expect(r"^step ", after=before)
        assert row_of(training)["state"] == "running"
        changed = {"every": "1", "policy": "report"}
        wait_until(lambda: nan_of(pid)["options"] == changed, what="the options as they are now")
        assert nan_of(pid)["settings"]["recorder"] == "20"
        assert row_of(training)["plugins"]["nan"]["policy"] == "report"
        watching.detach()


def test_modules_that_were_selected_are_on_metrics_and_what_is_not_is_reported(training):
    """`qkv` is three levels deep; no plugin measures the cost of modules."""
    words = ("-p", "activations:every=1,modules=*.qkv")
    with attached(training, *words, HOOKD_TOP_MODULES="0", HOOKD_MAX_DEPTH="1", HOOKD_MAX_SERIES="1000") as watching:
        qkv = {f"blocks.{n}.attention.qkv" for n in range(3)}
        wait_until(
            lambda: qkv <= watching.metrics().labels("hookd_activations_mean", "module"), what="the selected modules"
        )
        watching.detach()


@pytest.mark.load
def test_what_is_not_on_metrics_is_reported_where_it_is_served_and_by_status_and_report(training):
    with attached(training, "-p", "activations:every=1", HOOKD_TOP_MODULES="0", HOOKD_MAX_DEPTH="0") as watching:
        wait_until(lambda: watching.metrics().total("hookd_series_dropped_total") > 0, what="series that are dropped")
        watching.process.expect(
            rf"^hookd: process {training.pid} \(run train\.py@\w+\): \d+ series are not on /metrics, .*HOOKD_DETAIL=all"
        )
        assert row_of(training)["series_dropped"] > 0
        for words in (["status"], ["report", str(training.pid)]):
            assert re.search(r"\d+ series are not on /metrics, .*HOOKD_DETAIL=all", hookd(*words, COLUMNS="400"))
        watching.detach()
