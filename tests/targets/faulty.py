"""A small net with one known fault that happens at one known step and stays: `--fault KIND --at STEP`.

With `--when FILE`, it happens in the step in which that file exists.
"""

import math
import os
import sys

import torch
from _steps import parse, train
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.linear(self.norm(x)))


def poison(_module, _inputs, output):
    output = output.clone()
    output[0, 0] = float("nan")
    return output


def strike(layer):
    """Make those faults that happen once."""
    if arguments.fault == "forward-nan":
        layer.register_forward_hook(poison)
    elif arguments.fault == "grad-nan":
        layer.register_forward_hook(lambda _m, _i, output: output.register_hook(lambda g: g * float("nan")) and None)
    elif arguments.fault == "weight-nan":
        with torch.no_grad():
            layer.weight[0, 0] = float("nan")
    elif arguments.fault == "overflow":
        with torch.no_grad():
            layer.weight.fill_(3e38)
    elif arguments.fault == "dead-relu":
        with torch.no_grad():
            for block in model.layers:
                block.linear.bias.fill_(-10.0)


def loss_of(step):
    if arguments.at == math.inf and os.path.exists(arguments.when):
        arguments.at = step
    if step == arguments.at:
        print(f"fault {arguments.fault} at step {step}", file=sys.stderr, flush=True)
        strike(model.layers[2].linear)
    x = torch.randn(64, 16)
    out = model(x)
    loss = nn.functional.mse_loss(out, x.sum(1, keepdim=True))
    if step < arguments.at:
        return loss
    if arguments.fault == "loss-nan":
        return loss * float("nan")
    if arguments.fault == "exploding":
        return loss * 3.0 ** min(step - arguments.at + 1, 60)
    if arguments.fault == "vanishing":
        for depth, block in enumerate(model.layers):
            block.linear.weight.data.mul_(0.1 ** (1 + depth % 3))
    if arguments.fault == "leak":
        kept.append(out)
    return loss


arguments = parse(fault="none", at=30, when="")
if arguments.when:
    arguments.at = math.inf
width, kept = 32, []
model = nn.Sequential()
model.add_module("embed", nn.Linear(16, width))
model.add_module("layers", nn.Sequential(*(Layer(width) for _ in range(6))))
model.add_module("head", nn.Linear(width, 1))
train(arguments, model, loss_of, torch.optim.SGD(model.parameters(), lr=0.01))
