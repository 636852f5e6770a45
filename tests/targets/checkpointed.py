"""Activation checkpointing: `--kind reentrant`, `nonreentrant` or `selective`."""

import functools

import torch
from _steps import parse, train
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **how)
        return self.last(x)


arguments = parse(kind="nonreentrant")
how = {"use_reentrant": arguments.kind == "reentrant"}
if arguments.kind == "selective":
    saved = [torch.ops.aten.addmm.default]
    how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saved)
model = Net()
train(arguments, model, lambda step: model(torch.randn(8, 4)).square().mean())
