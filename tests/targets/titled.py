"""Trains under a title, written over its command line and its environment; at SIGTERM it ends.

With `--hides 1` the C library has no environment any more either, only the one that Python has read at its start. With
`--gone 1` the standard library is gone from its disk.
"""

import ctypes
import os
import signal
import sys
import time

import torch
from _steps import checksum, parse
from torch import nn

arguments = parse(title="ray::train", libraries="", hides=0, gone=0)
sys.path.append(arguments.libraries)
import setproctitle  # noqa: E402

is_over = False
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def on_term(*_):
    global is_over
    is_over = True


signal.signal(signal.SIGTERM, on_term)
setproctitle.setproctitle(arguments.title)
if arguments.hides:
    ctypes.CDLL(None).clearenv()
if arguments.gone:
    library = os.path.dirname(os.__file__).encode()
    MS_REC, MS_PRIVATE, CLONE_NEWNS = 0x4000, 1 << 18, 0x20000
    libc = ctypes.CDLL(None)
    assert libc.unshare(CLONE_NEWNS) == libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"none", library, b"tmpfs", 0, None) == 0
    assert not os.listdir(library)
print("ready", flush=True)
while not is_over:
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
print("done", checksum(model), flush=True)
