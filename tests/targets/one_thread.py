"""A training of one thread that forks in every way a training does, with every warning an error; `--watched`.

Prints how many threads it had at each fork, as the kernel counts them, and a digest of its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import hookd
from hookd.target.boot import bootstrap

counted: list[int] = []
# Before hookd's own: what is registered first is called last.
os.register_at_fork(before=lambda: counted.append(threads()))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def others() -> list[str]:
    """Return the threads that are neither the main one nor hookd's."""
    found = []
    for task in set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/self/task/{task}/comm").read_text() != "hookd\n":
                found.append(task)
    return found


class Busy(hookd.Plugin):
    """Has work in all kinds of threads that there are: each second, and beside the training."""

    name = "busy"
    ticks = 0

    @hookd.hookimpl
    def configure(self, context):
        self.context = context
        self.done = 0

    @hookd.hookimpl
    def tick(self, now_s):
        Busy.ticks += 1

    @hookd.hookimpl
    def step_done(self, step):
        self.context.aside(self.work)

    def work(self):
        self.done += 1


def child() -> None:
    os._exit(0)


def fork() -> None:
    pid = os.fork()
    if not pid:
        child()
    assert os.waitpid(pid, 0)[1] == 0


def fork_terminal() -> None:
    pid, terminal = os.forkpty()
    if not pid:
        child()
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


def start_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.monotonic)
    process.start()
    process.join()
    assert process.exitcode == 0


def prepare_child() -> None:
    assert subprocess.run([sys.executable, "-c", ""], preexec_fn=time.monotonic, check=False).returncode == 0


def load_data() -> None:
    """Read what two workers give; the threads of the DataLoader's queues begin when both are forked."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # where this process has one processor alone
    loader = DataLoader(torch.arange(8.0), num_workers=2, multiprocessing_context="fork")
    assert sum(float(one) for one in loader) == 28.0
    until = time.monotonic() + 60
    while others() and time.monotonic() < until:
        pass


def train() -> str:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        for act in (fork, fork_terminal, start_process, prepare_child, load_data):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
            act()
    digest = hashlib.sha256()
    for one in model.parameters():
        digest.update(one.detach().numpy().tobytes())
    return digest.hexdigest()


def wait_for_threads() -> None:
    """Wait until hookd's thread is there again after the last fork."""
    until = time.monotonic() + 60
    while threads() < 2 and time.monotonic() < until:
        time.sleep(0.001)


def fork_until_ticked() -> None:
    """Fork all the time, until a second has passed for hookd as well."""
    before, until = Busy.ticks, time.monotonic() + 60
    while Busy.ticks == before:
        assert time.monotonic() < until, "no tick comes while it forks"
        fork()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--watched", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("error")
    if options.watched:
        busy = {"name": "busy", "entry": "__main__:Busy"}
        plugins = [*({"name": name} for name in ("nan", "timing", "activations")), busy]
        bootstrap.start({"method": "start", "plugins": plugins, "lease_s": None})
        assert threads() > 1, "hookd is there"
    print("weights", train())
    print("threads", sorted(set(counted)), len(counted))
    if options.watched:
        fork_until_ticked()
        wait_for_threads()
        assert threads() > 1, "hookd is there again"
        print("steps", hookd.read()["step"]["counted"])
        hookd.stop()
    assert threading.active_count() == 1


if __name__ == "__main__":
    main()
