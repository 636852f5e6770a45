"""Trains for ever; a line on its stdin names a fault, which happens between two steps or in the next forward.

`doomed.py [RANK WORLD_SIZE RENDEZVOUS]`: with these arguments it is one rank of a job under gloo.
"""

import ctypes
import os
import queue
import select
import signal
import sys
import threading
import time

import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))


def poison(_module, _inputs, output):
    return output * float("nan")


def hold_the_gil():
    ctypes.PyDLL(None).sleep(86400)


def fill_memory():
    while True:
        blocks.append(bytearray(os.urandom(1 << 20)) * 16)


def wait_for_ever(*_):
    time.sleep(86400)


def strike(fault):
    """Make a fault happen. If this returns, the fault stays in effect from now on."""
    inner = model.module if hasattr(model, "module") else model
    if fault == "nan":
        inner[2].register_forward_hook(poison)
    elif fault == "stall":
        inner[2].register_forward_pre_hook(wait_for_ever)
    elif fault == "slow":
        inner[2].register_forward_pre_hook(lambda *_: time.sleep(0.05))
    elif fault == "drift":
        with torch.no_grad():
            inner[2].weight[0, 0] += 1.0
    elif fault == "gil":
        inner[2].register_forward_pre_hook(lambda *_: hold_the_gil())
    elif fault == "segfault":
        ctypes.string_at(0)
    elif fault == "abort":
        os.abort()
    elif fault == "exit":
        os._exit(3)
    elif fault == "raise":
        raise RuntimeError("planted fault")
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "oom":
        fill_memory()
    elif fault == "step":
        print("stepped", steps, flush=True)
    else:
        sys.exit(0)


blocks = []
torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
if len(sys.argv) > 1:
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lines = queue.SimpleQueue()


def listen():
    """Read stdin in a thread, because ranks in a collective cannot."""
    for line in sys.stdin:
        lines.put(line.strip())
    lines.put("quit")


threading.Thread(target=listen, daemon=True).start()
steps = 0
print("ready", flush=True)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    steps += 1
    select.select([], [], [], 0.005)
    while not lines.empty():
        strike(lines.get())
