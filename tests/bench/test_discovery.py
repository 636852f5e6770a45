"""The cost of discovery among many Python processes, some with very many descriptors, and how soon it finds one.

make bounds ARGS="-k discovery"
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time

import psutil
import pytest

from hookd.errors import DaemonNotRunning
from hookd.tool.daemon.client import DaemonClient
from tests.support.environment import target_environment, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD

PROCESSES = 200
WITH_MANY = 20
DESCRIPTORS = 10_000
WATCHED_S = 30.0
SEEN_WITHIN_S = 5.0
CORE_SHARE = 0.01

HOLDER = """
import mmap, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
file = open(sys.argv[1], "rb")
library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
copies = [os.dup(0) for _ in range(int(sys.argv[2]))]
print("ready", flush=True)
sys.stdin.read()
"""

pytestmark = [pytest.mark.bench, pytest.mark.load]


@pytest.fixture
def hold(stack, tmp_path):
    """Start a process that looks like a training from outside."""
    library = tmp_path / "libtorch_stub.so"
    library.write_bytes(bytes(4096))

    def start(descriptors, **extra):
        command = [sys.executable, "-S", "-c", HOLDER, str(library), str(descriptors)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=target_environment(**extra), text=True
        )
        stack.callback(process.communicate, timeout=30)
        stack.callback(process.kill)
        return process

    return start


@pytest.fixture
def daemon(stack, tmp_path):
    """Start `hookd serve` with its defaults."""
    client = DaemonClient(tmp_path / "control.sock")
    (tmp_path / "hookd.toml").write_text('[attach]\ntimeout_s = 0.5\n[[rule]]\nenvironment = { BENCH = "1" }\n')
    state = ("--state-dir", tmp_path, "--control", client.path, "--listen", "127.0.0.1:0")
    command = [*HOOKD, "serve", "--config", tmp_path / "hookd.toml", *state]
    client.process = stack.enter_context(Process(command, env=tool_environment()))

    def answers():
        with contextlib.suppress(DaemonNotRunning):
            return client.version()

    wait_until(answers, what="the daemon")
    return client


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, of its children that have ended, and of those that still run."""
    its = psutil.Process(pid)
    return sum(its.cpu_times()[:4]) + sum(sum(child.cpu_times()[:4]) for child in its.children(recursive=True))


def test_discovery_among_many_processes_is_cheap_and_quick(hold, daemon):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < DESCRIPTORS + 100:
        pytest.skip(f"RLIMIT_NOFILE allows fewer than {DESCRIPTORS} descriptors")
    processes = [hold(DESCRIPTORS if n < WITH_MANY else 10) for n in range(PROCESSES)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    time.sleep(65)  # from then on, a process is not examined again for being young
    before, started = cpu_s(daemon.process.pid), time.monotonic()
    time.sleep(WATCHED_S)
    share = (cpu_s(daemon.process.pid) - before) / (time.monotonic() - started)
    print(f"\n{PROCESSES} processes, {WITH_MANY} with {DESCRIPTORS} descriptors: {share:.2%} of a core")
    late = hold(10, BENCH="1")  # a rule wants it; the attach fails, which shows that the daemon has seen it
    started = time.monotonic()
    late.stdout.readline()
    wait_until(lambda: late.pid in {one["pid"] for one in daemon.status()["backing_off"]}, what="the late one")
    seen_s = time.monotonic() - started
    print(f"a new process was found, tried and given up for the time being within {seen_s:.1f} s")
    assert share < CORE_SHARE
    assert seen_s < SEEN_WITHIN_S
