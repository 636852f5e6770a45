"""A training in a process in which a library has replaced parts of the interpreter: `--by gevent`, or another of `BY`.

It does so before the training, with `--late 1` at SIGUSR1; then it prints `replaced`. At SIGTERM it prints `checkpoint` and ends.
"""

import asyncio
import itertools
import signal
import sys
import time
import warnings

import torch
from _steps import checksum, parse
from torch import nn


def gevent():
    from gevent import monkey

    monkey.patch_all()


def eventlet():
    import eventlet

    eventlet.monkey_patch()


def freezegun():
    import freezegun

    freezegun.freeze_time("2020-01-01").start()


def time_machine():
    import time_machine

    time_machine.travel(0, tick=False).start()


def pyfakefs():
    from pyfakefs.fake_filesystem_unittest import Patcher

    Patcher().setUp()


def uvloop():
    import uvloop

    uvloop.install()


BY = {one.__name__: one for one in (gevent, eventlet, freezegun, time_machine, pyfakefs, uvloop)}
arguments = parse(by="gevent", late=0, libraries="")
sys.path.append(arguments.libraries)
warnings.simplefilter("ignore")
is_due, is_over = not arguments.late, False
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def on_usr1(*_):
    global is_due
    is_due = True


def on_term(*_):
    global is_over
    is_over = True


def train(number):
    global is_due
    if is_due:
        is_due = False
        BY[arguments.by]()
        print("replaced", flush=True)
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    if number == 20:
        print("ready", flush=True)


async def train_in_a_loop():
    for number in itertools.count(1):
        train(number)
        await asyncio.sleep(arguments.pause)
        if is_over:
            return


signal.signal(signal.SIGUSR1, on_usr1)
signal.signal(signal.SIGTERM, on_term)
if arguments.by == "uvloop":
    train(0)
    asyncio.run(train_in_a_loop())
for number in itertools.count(1):
    if is_over:
        break
    train(number)
    time.sleep(arguments.pause)
print("checkpoint", checksum(model), flush=True)
