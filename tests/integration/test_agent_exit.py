"""A process that ends while hookd's own threads are inside of torch's C++ ends as it would without hookd."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.environment import REPOSITORY, tool_environment

PREAMBLE = """
import atexit, os, sys, threading, time, torch
from hookd import Plugin, hookimpl
from hookd.target.boot import bootstrap

begun = threading.Event()
big = torch.ones(500, 500)

def work():
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        big.matmul(big)

def start(*plugins):
    specs = [{"name": one, "entry": "__main__:" + one.title(), "options": {}, "by_name": True} for one in plugins]
    bootstrap.start({"method": "start", "plugins": specs})
"""

TICKS = """
class Ticks(Plugin):
    name = "ticks"
    @hookimpl
    def tick(self):
        work()
"""

IN_A_TICK = f"""{TICKS}
start("ticks")
assert begun.wait(60)
"""

BACKGROUND = """
class Works(Plugin):
    name = "works"
    @hookimpl
    def configure(self, context):
        self.context = context
    @hookimpl
    def root_forward(self):
        self.context.aside(work)

start("works")
torch.nn.Identity()(big)
assert begun.wait(60)
"""

AT_A_LOOK_AT_THE_PROCESS_GROUPS = """
from hookd.target.events import liveness as stall
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
looked = stall._issued

def issued():
    begun.set()
    for _ in range(10_000):
        list(looked())
    return looked()

stall._issued = issued
start()
assert begun.wait(60)
"""

IN_A_HANDLER_THAT_DETACHES = f"""{TICKS}
    @hookimpl
    def unconfigure(self):
        print("unconfigured", flush=True)

atexit.register(lambda: print(bootstrap.stop()["restored"], flush=True))  # called after hookd's own
start("ticks")
assert begun.wait(60)
"""


WITH_NUMBERS_ON_A_DEVICE = """
from hookd.target.tensors import deferred, statistics
statistics.on_host, statistics.LOOKS_IN_C = lambda tensor: False, False
asked = []
deferred._Copy.is_over = lambda copy: asked.append(copy) or len(asked) > 5

class Sums(Plugin):
    name = "sums"
    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def forward(self, output):
        self.context.summary(output, lambda summary: print(summary.count, flush=True))

start("sums")
torch.nn.Linear(3, 2)(torch.ones(4, 3)).sum().backward()
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + code + "sys.exit(7)"], cwd=REPOSITORY, env=tool_environment(),
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "code", [IN_A_TICK, BACKGROUND, AT_A_LOOK_AT_THE_PROCESS_GROUPS], ids=["tick", "background", "groups"]
)
def test_the_process_ends_with_its_own_status(code) -> None:
    process = ended(code)
    assert (process.stdout, process.stderr, process.returncode) == ("", "", 7)


def test_a_handler_of_the_end_may_still_detach() -> None:
    process = ended(IN_A_HANDLER_THAT_DETACHES)
    assert (process.stdout, process.stderr, process.returncode) == ("unconfigured\nidentity\n", "", 7)


def test_numbers_that_a_device_still_has_at_the_end_arrive() -> None:
    process = ended(WITH_NUMBERS_ON_A_DEVICE)
    assert (process.stdout, process.stderr, process.returncode) == ("8\n", "", 7)
