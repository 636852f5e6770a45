"""A real Prometheus scrapes a real daemon that watches a real training process, from its first step to its death."""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.request

import pytest

from tests.support import prometheus as prometheus_server
from tests.support import tool, training
from tests.support.processes import Process, wait_until
from tests.support.tool import start_hookd
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

PUPPET = Job("puppet.py")
LINGER_S = 6


@pytest.fixture
def daemon(stack, tmp_path):
    """Return (url, host) of a running `hookd serve`."""
    control = tmp_path / "control.sock"
    options = (
        "--state-dir",
        tmp_path / "state",
        "--linger-s",
        str(LINGER_S),
        "--listen",
        "127.0.0.1:0",
        "--control",
        control,
    )
    process = stack.enter_context(start_hookd("serve", *options, HOOKD_POLL_S="0.2"))
    url = process.expect(r"http://127\.0\.0\.1:[1-9]\d*").group()
    return url, f"unix://{control}"


@pytest.fixture
def prometheus(stack, tmp_path, daemon):
    return prometheus_server.started(stack, tmp_path / "prometheus", daemon[0])


def page_of(url, run):
    """Return the lines of a scrape that are ours: other tests may run on this machine, with plugins that are worse."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    kept, comments = [], []
    for line in lines:
        if line.startswith("#"):
            comments = [*comments[-1:], line] if line.split()[1] == "TYPE" else [line]
        elif f'run="{run}"' in line or 'run="' not in line:
            kept += [*comments, line]
            comments = []
    return "\n".join(kept) + "\n"


def test_prometheus_follows_a_target_from_its_attach_to_its_death(stack, daemon, prometheus):
    url, host = daemon
    run = f"prom-{os.getpid()}"
    target = stack.enter_context(Process(PUPPET.command(), env=training.environment(HOOKD_RUN=run), stdin=True))
    target.expect("^ready$")
    wait_until(lambda: prometheus.value('up{job="hookd"}') == 1, what="the first scrape")

    # given a training process that runs, when somebody attaches, then queries by run, rank and module answer
    tool.hookd("attach", str(target.pid), "--host", host, "--timeout", "120")
    mine = f'run="{run}",rank="0"'
    wait_until(lambda: prometheus.value(f"hookd_target_up{{{mine}}}") == 1, what="the target in Prometheus")
    wait_until(lambda: prometheus.query(f"rate(hookd_steps_total{{{mine}}}[5s]) > 0"), what="steps that count up")
    forward = f'hookd_timing_forward_seconds_total{{{mine},module="0"}}'
    wait_until(lambda: (prometheus.value(forward) or 0) > 0, what="the first layer's time")

    def modules():
        return {labels["module"] for labels, _ in prometheus.query(f"hookd_timing_forward_calls_total{{{mine}}}")}

    wait_until(lambda: modules() == {"(root)", "0", "1", "2"}, what="all modules")
    joined = f"hookd_steps_total{{{mine}}} * on(run, rank) group_left(pid, script) hookd_target_info"
    ((labels, _),) = prometheus.query(joined)
    assert (labels["pid"], labels["script"].rpartition("/")[2]) == (str(target.pid), "puppet.py")
    median = f"histogram_quantile(0.5, rate(hookd_step_seconds_bucket{{{mine}}}[5s])) > 0"
    wait_until(lambda: prometheus.query(median), what="the time of a step")

    # and promtool has nothing to say about the page
    lint = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page_of(url, run),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")

    # when the process is killed, then its last counters stay for a while, with the reason, and its gauges are gone
    wait_until(lambda: prometheus.query(f"hookd_activations_mean{{{mine}}}"), what="the first gauge")
    target.signal(signal.SIGKILL)
    target.wait()
    wait_until(lambda: prometheus.value(f"hookd_target_up{{{mine}}}") == 0, what="the death in Prometheus")
    assert prometheus.query(f'hookd_target_info{{{mine},reason="signal SIGKILL"}}')
    final = prometheus.value(f"hookd_steps_total{{{mine}}}")
    assert final is not None
    assert final > 0
    assert prometheus.value(forward) is not None
    assert not prometheus.query(f"hookd_activations_mean{{{mine}}}")
    assert not prometheus.query(f"hookd_heartbeat_timestamp_seconds{{{mine}}}")
    assert prometheus.value(f"hookd_steps_total{{{mine}}}") == final

    # and then every series is gone, while the daemon itself stays up
    wait_until(lambda: not prometheus.query(f'{{run="{run}"}}'), what="the end of all series")
    assert run not in page_of(url, run)
    assert prometheus.value('up{job="hookd"}') == 1
    assert prometheus.query("hookd_build_info")
