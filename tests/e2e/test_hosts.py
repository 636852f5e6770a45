"""A job over three hosts, each with its daemon, and one Prometheus that knows them by http_sd alone."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support import hosts, prometheus
from tests.support.environment import REPOSITORY, TARGETS, bare_python, target_environment, tool_environment
from tests.support.hosts import Host
from tests.support.processes import Process, wait_until
from tests.support.prometheus import Prometheus

pytestmark = [pytest.mark.usefixtures("attachable"), pytest.mark.load]

RANKS = 3
RUN = "three-hosts"
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}}
rule_files: ["{rules}/*.yml"]
scrape_configs:
  - job_name: hookd
    http_sd_configs: [{services}]
"""
QUICK = {"[2m]": "[8s]", "for: 3m": "for: 2s", "[3m]": "[2s]", "offset 3m": "offset 2s"}
"""Changes of the shipped rules, so that a test sees in seconds the alerts that otherwise take minutes."""
MISSING = f'count by (run) (hookd_target_up{{run="{RUN}"}} == 1) < {RANKS}'

FEWER = "count by (run) (hookd_target_up == 1) < max_over_time(count by (run) (hookd_target_up == 1)[1h:1s])"


class Fleet:
    """Hosts with a daemon and a rank each, a switch, and Prometheus on it."""

    def __init__(self, stack, directory):
        self._stack = stack
        self.switch = self._host(254, None)
        self.hosts = [self._host(number + 1, self.switch) for number in range(RANKS)]
        daemons = [self._start(host, *self._daemon(host, directory)) for host in self.hosts]
        self.ranks = [self._start(host, *self._rank(host)) for host in self.hosts]
        for daemon in daemons:
            daemon.expect("serves http://")
        config = CONFIG.format(rules=_quick_rules(directory), services=", ".join(map(_service, self.hosts)))
        server = (directory / "prometheus", "", config, f"{self.switch.address}:9090", self.switch.inside())
        self._prometheus = Prometheus(*server)
        stack.callback(self._prometheus.process.close)
        wait_until(functools.partial(self.switch.call, self._prometheus.is_ready), what="Prometheus")
        for rank in self.ranks:
            rank.expect("step 10$")

    def _host(self, number, switch):
        return self._stack.enter_context(contextlib.closing(Host(number, switch)))

    def _start(self, host, command, environment):
        return self._stack.enter_context(Process(host.inside(*command), env=environment))

    def _daemon(self, host, directory):
        where = ("--control", "/run/hookd.sock", "--state-dir", directory / f"state{host.number}")
        command = [sys.executable, "-m", "hookd", "serve", "--listen", _address(host), *where]
        return command, tool_environment(HOOKD_POLL_S="0.3", HOOKD_SCAN_S="0.3")

    def _rank(self, host):
        place = {
            "RANK": host.number - 1, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0", "HOOKD": 1, "HOOKD_RUN": RUN,
        }  # fmt: skip
        words = {name: str(value) for name, value in place.items()}
        return [bare_python(), TARGETS / "hosts.py"], target_environment(**words)

    def query(self, expression):
        return self.switch.call(lambda: self._prometheus.query(expression))

    def wait(self, expression, label, wanted):
        """Wait until a query gives these values, by the value of a label."""
        found = {}

        def is_so():
            found.clear()
            found.update({labels[label]: value for labels, value in self.query(expression)})
            return found == wanted

        wait_until(is_so, what=lambda: f"{expression}: {found}, not {wanted}")

    def wait_alert(self, name, label, *wanted):
        """Wait until an alert fires for these values of a label, and for no others."""
        self.wait(f'ALERTS{{alertname="{name}",alertstate="firing"}}', label, dict.fromkeys(wanted, 1.0))

    def turn(self, rank):
        """Make a rank slow, or quick again: it is what nsenter has started."""
        pid = self.ranks[rank].pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), signal.SIGUSR1)


def _address(host):
    return f"{host.address}:9465"


def _service(host):
    return f'{{url: "http://{_address(host)}/sd", refresh_interval: 1s}}'


def _quick_rules(directory):
    (quick := directory / "rules").mkdir()
    for path in (REPOSITORY / "deploy/prometheus/rules").glob("*.yml"):
        text = path.read_text()
        for slow, fast in QUICK.items():
            text = text.replace(slow, fast)
        (quick / path.name).write_text(text)
    return quick


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    if why := hosts.why_not():
        pytest.skip(why)
    if not prometheus.is_there():
        pytest.skip("Prometheus is not installed here (Debian: apt install prometheus)")
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("fleet"))


def test_every_daemon_serves_its_own_rank_and_prometheus_has_them_all(fleet):
    instances = {_address(host): 1.0 for host in fleet.hosts}
    fleet.wait('up{job="hookd"}', "instance", instances)
    fleet.wait(f'hookd_target_up{{run="{RUN}"}}', "rank", {"0": 1.0, "1": 1.0, "2": 1.0})
    fleet.wait(f'hookd_target_up{{run="{RUN}"}}', "instance", instances)
    # all that the run says it has are there
    fleet.wait(f'count by (run, world_size) (hookd_target_info{{run="{RUN}"}})', "world_size", {"3": 3.0})
    assert not fleet.query(MISSING)
    # they stand at the same step, each counted by its own daemon
    fleet.wait("count by (run) (rate(hookd_steps_total[8s]) > 0)", "run", {RUN: 3.0})
    fleet.wait("count by (run) (run_rank:hookd_straggler_score:ratio > 0)", "run", {RUN: 3.0})
    fleet.wait_alert("HookdStraggler", "run")
    fleet.wait_alert("HookdDown", "instance")


def test_a_cut_cable_is_a_gap_of_one_host_and_the_job_goes_on_behind_it(fleet):
    cut = fleet.hosts[1]
    cut.cut()
    fleet.wait('up{job="hookd"} == 0', "instance", {_address(cut): 0.0})
    fleet.wait(MISSING, "run", {RUN: 2.0})
    fleet.wait(FEWER, "run", {RUN: 2.0})  # its series are stale, nothing says that its rank has ended
    fleet.wait_alert("HookdDown", "instance", _address(cut))
    assert not fleet.query(f'hookd_target_up{{run="{RUN}"}} == 0')
    fleet.wait_alert("HookdTargetLost", "run")
    # the others wait for it in their collectives
    fleet.wait("rate(hookd_steps_total[3s]) == 0", "rank", {"0": 0.0, "2": 0.0})
    cut.join()
    fleet.wait('up{job="hookd"}', "instance", {_address(host): 1.0 for host in fleet.hosts})
    fleet.wait("rate(hookd_steps_total[3s]) > bool 0", "rank", {"0": 1.0, "1": 1.0, "2": 1.0})
    fleet.wait_alert("HookdDown", "instance")
    assert not fleet.query(MISSING)
    assert not fleet.query(FEWER)


@pytest.mark.load
def test_a_slow_rank_is_found_among_hosts_that_each_have_only_one(fleet):
    fleet.turn(2)
    fleet.wait_alert("HookdStraggler", "run", RUN)
    fleet.wait("run_rank:hookd_straggler_seconds:for3m > bool 0", "rank", {"2": 1.0})
    assert not fleet.query("hookd_straggler == 1")  # a daemon that has one rank has nothing to compare it with
    fleet.turn(2)
    fleet.wait_alert("HookdStraggler", "run")


def test_a_dead_host_is_down_and_what_its_end_does_to_the_others_is_reported(fleet):
    """This must be the last test on the fleet."""
    dead, alive = fleet.hosts[2], fleet.hosts[:2]
    dead.close()
    fleet.wait('up{job="hookd"}', "instance", {**{_address(host): 1.0 for host in alive}, _address(dead): 0.0})
    fleet.wait_alert("HookdDown", "instance", _address(dead))
    # of its own rank nothing is known any more; those of the others have lost their peer, and ended by that
    fleet.wait(f'hookd_target_up{{run="{RUN}"}}', "rank", {"0": 0.0, "1": 0.0})
    fleet.wait_alert("HookdTargetLost", "run", RUN)
    fleet.wait(
        "group by (rank) (instance_run_rank_reason_user:hookd_target_lost:last10m)", "rank", {"0": 1.0, "1": 1.0}
    )
