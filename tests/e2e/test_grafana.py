"""Every query of every dashboard has data in a real Prometheus that scrapes a real daemon with a real job of two ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from tests.support import prometheus, training
from tests.support.daemon import Daemon
from tests.support.dashboards import Query, chosen, every_query
from tests.support.environment import TARGETS, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import hookd

pytestmark = [pytest.mark.usefixtures("attachable"), pytest.mark.timeout(600), pytest.mark.load]

WITHOUT_DATA = {
    ("hookd-run", "CUDA memory"): "the CUDA allocator's figures",
    ("hookd-module", "On the device"): "the seconds are taken from events in a CUDA stream",
    ("hookd-module", "Memory of a forward"): "the allocator's growth",
    ("hookd-run", "Tokens"): "the input is not token ids",
}
PLUGINS = (
    "nan:every=1", "activations:every=2", "timing:every=2,peak_flops=1e12", "memory:every=2", "optimizer:every=2",
    "coverage:every=2", "gradclip", "drift:every=5", "learning:every=2",
)  # fmt: skip
SETTLED_S = 240
"""A straggler's score needs 8 s of steps, on a quiet machine."""


@pytest.fixture
def job(stack, tmp_path):
    """Start two ranks; return their run and processes."""
    run = f"grafana-{os.getpid()}"
    command = [bare_python(), TARGETS / "everything.py", tmp_path / "store"]
    ranks = [
        stack.enter_context(
            Process(
                command, env=training.environment(HOOKD_RUN=run, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            )
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        process.expect(f"^rank {rank} trains$")
    return run, ranks


@pytest.fixture
def watched(stack, tmp_path, job):
    """Attach to the job with all plugins; return a Prometheus that was there before."""
    daemon = Daemon(tmp_path)
    stack.callback(daemon.process.close)
    server = prometheus.started(stack, tmp_path / "prometheus", daemon.url)
    wait_until(lambda: server.query("hookd_build_info"), what="the first scrape")
    pids = [str(process.pid) for process in job[1]]
    plugins = [part for plugin in PLUGINS for part in ("-p", plugin)]
    hookd("attach", *pids, *plugins, "--host", f"unix://{daemon.client.path}", "--timeout", "60")
    no_training = stack.enter_context(Process([sys.executable, "-c", "input()"], env=target_environment(), stdin=True))
    hookd("attach", str(no_training.pid), "--host", f"unix://{daemon.client.path}", "--timeout", "1", status=6)
    return server


def test_every_query_of_every_dashboard_has_data(watched, job):
    run, ranks = job
    assert set(WITHOUT_DATA) <= {(query.dashboard, query.panel) for query in every_query()}
    began, left = time.time(), [query for query in every_query() if (query.dashboard, query.panel) not in WITHOUT_DATA]
    assert len(left) > 150

    def is_empty(query: Query) -> bool:
        found = watched.labels(chosen(query.expr, "10s", run=run), began - 30, time.time(), 1)
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        return not any(named <= set(labels) for labels in found)

    def all_have_data() -> bool:
        left[:] = filter(is_empty, left)
        return not left

    wait_until(
        lambda: watched.query(f'hookd_steps_total{{run="{run}", rank="1"}} > 100'), what="steps of healthy training"
    )
    ranks[1].signal(signal.SIGUSR1)
    wait_until(all_have_data, SETTLED_S, lambda: "\n".join(f"{query.place}: {query.expr}" for query in left))
