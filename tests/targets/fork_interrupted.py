"""A fork that waits for hookd's work, and a signal meanwhile whose handler raises: for the program, and in the parent alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings

import torch

import hookd
from hookd.target.boot import bootstrap

begun, forking, handled = threading.Event(), threading.Event(), threading.Event()


class PreemptedError(Exception):
    pass


class Busy(hookd.Plugin):
    """Works beside the training until a fork has begun and a signal has been handled since."""

    name = "busy"

    @hookd.hookimpl
    def configure(self, context):
        self.context = context

    @hookd.hookimpl
    def step_done(self, step):
        if step == 1:
            self.context.aside(self.work)

    def work(self):
        begun.set()
        forking.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        handled.wait()


def handle(*_):
    handled.set()
    raise PreemptedError


def step() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()


WARN = """
def warn():
    for _ in range(1000):
        pass
"""


def warn_after_forks() -> None:
    """Imitate CPython 3.12 and newer in a program of several threads, which runs code of `warnings` before the fork returns."""
    names = {"__name__": "warnings"}
    exec(WARN, names)
    os.register_at_fork(after_in_parent=names["warn"])


def fork() -> str:
    child = -1
    try:
        child = os.fork()
        for _ in range(1000):
            pass
    except PreemptedError:
        outcome = "interrupted"
    else:
        outcome = "not interrupted"
    if child == 0:
        os._exit(int(outcome == "interrupted"))
    return outcome


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This process")  # torch may have threads of its own
    signal.signal(signal.SIGUSR1, handle)
    plugins = [{"name": "busy", "entry": "__main__:Busy"}]
    bootstrap.start({"method": "start", "plugins": plugins, "lease_s": None})
    step()
    begun.wait()
    os.register_at_fork(before=forking.set)  # after hookd's own: what is registered last is called first
    if sys.argv[1:] == ["warned"]:
        warn_after_forks()
    print("parent", fork())
    print("child", os.wait()[1])
    hookd.stop()
