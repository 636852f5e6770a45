"""A model, and trainings in which gradients are clipped by the script or by a plugin."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), Block(16), Block(16), nn.Linear(16, 1)).to(dtype)


def decay_groups(model):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.AdamW(decay_groups(m), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def train(model, optimizer, *, clip=None, steps=12, accumulate=1, scaler=None, dtype=torch.float32):
    """Train; return all weights in one tensor. `clip` is the script's own clipping before a step."""
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            out = model(torch.randn(8, 6, dtype=dtype))
            loss = functional.mse_loss(out.float(), torch.ones(8, 1)) * 10
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def both(hook, clip, *, optimizer="adamw", dtype=torch.float32, scaler=None, options=None, **how):
    """Train with the clipping in the script, and with the plugin's; return both results and an unclipped one."""

    def run(clip):
        model = net(dtype)
        return train(model, OPTIMIZERS[optimizer](model), clip=clip, dtype=dtype, scaler=scaler and scaler(), **how)

    script, plain = run(clip), run(None)
    hook.start("gradclip", **(options or {}))
    return run(None), script, plain
