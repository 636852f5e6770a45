"""A training that at SIGUSR1 replaces all descriptors from 3 to `--to` by a file of its own, and writes to them at SIGTERM."""

import itertools
import os
import signal
import tempfile
import time

import torch
from _steps import checksum, parse
from torch import nn

arguments = parse(to=256)
is_due = is_over = False
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def on_usr1(*_):
    global is_due
    is_due = True


def on_term(*_):
    global is_over
    is_over = True


signal.signal(signal.SIGUSR1, on_usr1)
signal.signal(signal.SIGTERM, on_term)
for number in itertools.count(1):
    if is_over:
        break
    if is_due:
        is_due = False
        os.closerange(3, arguments.to)
        mine = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        for fd in range(3, arguments.to):
            os.dup2(mine.fileno(), fd)
        print("closed", flush=True)
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    if number == 20:
        print("ready", flush=True)
    time.sleep(arguments.pause)
for fd in range(3, arguments.to):
    os.write(fd, b"mine")
print("written", mine.seek(0, os.SEEK_END) // 4, checksum(model), flush=True)
