"""A parent that trains nothing and forks two ranks and a bystander, which calls a module and trains nothing either."""

import os
import sys

import torch
from torch import nn


def train(number):
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        opt.step()
    with torch.no_grad():
        print(f"rank {number} {sum(p.double().sum() for p in model.parameters()):.17g}", flush=True)


def forked(work, *arguments):
    pid = os.fork()
    if not pid:
        torch.manual_seed(0)
        work(*arguments)
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    return pid


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)  # imports torch's compiler: once, not in each child
    wait, end = os.pipe()
    pids = [
        forked(train, 0),
        forked(train, 1),
        forked(lambda: print("bystander", nn.Linear(1, 1)(torch.ones(1)).shape)),
    ]
    print("pids", *pids, flush=True)
    sys.stdin.readline()
    os.close(end)
    for pid in pids:
        os.waitpid(pid, 0)
