"""A training of a model of many modules, in the shape of real ones; it knows nothing of hookd.

    python tests/bench/deep.py MODULES FILE

After two steps it says "ready"; from then on it writes the end of each step, in ns of the monotonic clock, as a line of
FILE, until a line comes on its stdin.
"""

import select
import sys
import time

import torch
from torch import nn

WIDTH = 4
LAYERS = (lambda: nn.Linear(WIDTH, WIDTH), nn.ReLU, lambda: nn.LayerNorm(WIDTH), nn.Tanh)
BLOCKS = 20


def deep(modules):
    """Return a model with exactly this number of modules: `stage.block.layer`, four layers a block and twenty blocks a stage."""
    left, stages = modules - 1, []
    while left > 0:
        left, blocks = left - 1, []
        while left > 0 and len(blocks) < BLOCKS:
            left -= 1
            layers = [make() for make in LAYERS[:left]]
            left -= len(layers)
            blocks.append(nn.Sequential(*layers))
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*stages)


def train(model):
    """Take steps for ever; each is one `next`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, WIDTH)
    while True:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        yield


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = train(deep(int(sys.argv[1])))
    next(steps)
    next(steps)
    print("ready", flush=True)
    with open(sys.argv[2], "w", buffering=1) as file:
        while not select.select([sys.stdin], [], [], 0)[0]:
            next(steps)
            file.write(f"{time.monotonic_ns()}\n")
    print("done", flush=True)


if __name__ == "__main__":
    main()
