"""A rank of a gloo job under DistributedDataParallel, small; SIGUSR1 makes it slow in its forward, or quick again."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.pause_s = 0.0

    def forward(self, x):
        time.sleep(self.pause_s)
        return self.linear(x)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layer = Layer()

    def turn(*_):
        layer.pause_s = 0.15 - layer.pause_s

    signal.signal(signal.SIGUSR1, turn)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.rand(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)  # a step takes long enough that three of them leave a processor for others
        step += 1
        if step in (1, 10):
            print(f"rank {os.environ['RANK']} step {step}", flush=True)


main()
