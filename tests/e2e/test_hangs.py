"""Hangs of real trainings, as a daemon, its clients and its metrics tell of them."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.support import forked, training
from tests.support.daemon import Daemon
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import hookd

pytestmark = [pytest.mark.usefixtures("attachable")]

RUN = f"hangs-{os.getpid()}"
"""The daemon sees what else trains on this machine."""


@pytest.fixture
def serve(stack, tmp_path):
    """Start an impatient daemon; each has the state of the one before."""
    config = tmp_path / "hookd.toml"
    config.write_text("[hang]\nafter_s = 3\nfactor = 1\nstart_s = 30\n")

    def start():
        daemon = Daemon(tmp_path, "--config", config)
        stack.callback(daemon.process.close)
        return daemon

    return start


def reported(daemon):
    """Return the kinds of the daemon's incidents about hangs, oldest first, and the last of these incidents."""
    rows = daemon.client.incidents(run=RUN)
    rows = [row for row in rows if row["kind"].startswith("hang")]
    return [row["kind"] for row in reversed(rows)], (rows[0] if rows else None)


def wait_for(daemon, count):
    """Wait until there are this many incidents; return the last."""
    wait_until(
        lambda: len(reported(daemon)[0]) >= count, what=lambda: f"{reported(daemon)} {daemon.process.describe()}"
    )
    kinds, last = reported(daemon)
    assert len(kinds) == count, kinds
    return last


def test_a_stalled_a_stopped_and_a_native_rank_are_named_through_a_restart_of_the_daemon(serve, stack, tmp_path):
    command = [bare_python(), TARGETS / "hanging.py", tmp_path]
    job = stack.enter_context(
        Process(command, env=training.environment(HOOKD_RUN=RUN), cwd=TARGETS, popen=forked.start)
    )
    pids = [int(job.expect(rf"rank {rank} is (\d+)")[1]) for rank in (0, 1)]
    daemon = serve()
    host = ("--host", f"unix://{daemon.client.path}")
    hookd("attach", *map(str, pids), "-p", "timing", "--timeout", "120", *host)
    wait_until(lambda: all(row["step"]["counted"] > 5 for row in daemon.rows(RUN)), what="steps")

    (tmp_path / "sleep").touch()
    found = wait_for(daemon, 1)
    assert (found["kind"], found["pid"], found["rank"], found["module"]) == ("hang", pids[1], "1", "blocks.2")
    assert "rank 1 stands in forward of blocks.2" in found["message"]
    assert "rank 0 waits for it in the collectives of the backward" in found["message"]
    assert found["detail"]["basis"] == "collectives"
    metrics = daemon.metrics()
    assert metrics.labels("hookd_hang", "rank", run=RUN, role="stands") == {"0", "1"}
    standing = {sample.labels["rank"]: sample.value for sample in metrics.select("hookd_hang", run=RUN, role="stands")}
    assert standing == {"0": 0.0, "1": 1.0}
    shown = " ".join(hookd("status", *host).split())
    assert f"{pids[1]}: hangs in forward of blocks.2" in shown
    assert re.search(rf"{pids[0]}: waits in the collectives of the backward [^:]*for rank 1, for ", shown)
    waits = hookd("report", str(pids[0]), *host)
    assert "incidents: none of this rank" in waits
    assert re.search(rf"of rank 1 \(process {pids[1]}\): rank 1 stands", " ".join(waits.split()))
    assert "first reported as: rank 1 stands" in " ".join(hookd("report", str(pids[1]), *host).split())

    daemon.process.signal(signal.SIGKILL)
    daemon.process.wait()
    daemon = serve()
    wait_until(lambda: [row["hang"]["role"] for row in daemon.rows(RUN) if row["hang"]] == ["waits", "stands"])
    (tmp_path / "sleep").unlink()
    over = wait_for(daemon, 2)
    assert (over["kind"], over["pid"]) == ("hang_over", pids[1])
    assert "after hanging for at least" in over["message"]

    os.kill(pids[0], signal.SIGSTOP)
    stack.callback(os.kill, pids[0], signal.SIGCONT)
    found = wait_for(daemon, 3)
    assert (found["pid"], found["detail"]["basis"]) == (pids[0], "process")
    assert "The process is stopped" in found["message"]
    os.kill(pids[0], signal.SIGCONT)
    assert wait_for(daemon, 4)["kind"] == "hang_over"

    (tmp_path / "native").touch()
    found = wait_for(daemon, 5)
    assert (found["pid"], found["module"]) == (pids[1], "blocks.2")
    assert wait_for(daemon, 6)["kind"] == "hang_over"
    assert job.popen.poll() is None


@pytest.mark.load
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_stalled_rank_of_a_job_under_torchrun_is_named(serve, stack, workloads, ranks):
    job = training.Job("workloads/ddp.py", "--steps 0 --quiet --pause 0.3 --stall-rank 1 --stall-step 40", ranks)
    process = stack.enter_context(training.start_warm(job, HOOKD_RUN=RUN))
    daemon = serve()
    host = ("--host", f"unix://{daemon.client.path}")
    wait_until(lambda: hookd("ps", "--json").count("ddp.py") >= ranks, what="the ranks")
    hookd("attach", "--tree", str(process.pid), "--timeout", "60", *host)
    found = wait_for(daemon, 1)
    assert (found["rank"], found["module"]) == ("1", "blocks.2")
