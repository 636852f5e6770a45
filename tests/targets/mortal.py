"""Trains for ever, and ends as a line of its stdin says: by one of the functions below, or by `quit` normally."""

import ctypes
import os
import select
import sys

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.end = None

    def forward(self, x):
        if self.end is not None:
            self.end()
        return self.linear(x)


def fail():
    raise RuntimeError("planted \x1b[31mfault\nwith a second line")


def segfault():
    ctypes.string_at(0)


def leave():
    os._exit(3)


def hoard():
    kept = [bytearray(os.urandom(1) * (8 << 20)) for _ in range(1000)]
    sys.exit(f"there was room for {len(kept)}")


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Layer(), nn.ReLU(), Layer())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
steps, word = 0, ""
while word != "quit":
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    steps += 1
    if steps == 3:
        print("ready", flush=True)
    if select.select([sys.stdin], [], [], 0.005)[0]:
        word = sys.stdin.readline().strip() or "quit"
        model[2].end = None if word == "quit" else globals()[word]
