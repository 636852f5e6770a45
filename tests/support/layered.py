"""A model of a few layers, trainings in which one of them is struck, and what `nan` says of that."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

NAN, INF = math.nan, math.inf


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


def net(d=8, layers=4):
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, d))
    model.add_module("layers", nn.Sequential(*(Layer(d) for _ in range(layers))))
    model.add_module("head", nn.Linear(d, 1))
    return model


def poison(value):
    def hook(_module, _inputs, output):
        output = output.clone()
        output.view(-1)[0] = value
        return output

    return hook


def train(model, *, steps=6, at=3, strike=None, optimizer=None, loss=None):
    """Train, and do `strike` before step `at`."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        if step == at and strike is not None:
            strike()
        out = model(torch.randn(5, 4))
        value = loss(out, step) if loss is not None else functional.mse_loss(out, torch.zeros_like(out))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def found(incident):
    return incident.module, incident.fields["where"], incident.kind, incident.step


def findings(hook):
    """Return the incidents but for the one that tells of a policy that changes the training."""
    return [one for one in hook.incidents if one.kind != "training_changed"]


class Wrap(nn.Module):
    """Gives its input back in some other form."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


def scaled_training(model, optimizer, scaler, *, steps, accumulate=1, set_to_none=True):
    """Train as torch's AMP recipe says; return the number of steps that the scaler skipped."""
    skipped = 0
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
                value = functional.mse_loss(out.float(), torch.ones(16, 1)) / accumulate
            scaler.scale(value).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped
