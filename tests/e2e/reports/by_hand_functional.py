"""No optimizer and no backward: gradients come from torch.autograd.grad, and the parameters take a step of momentum.

Follows discuss.pytorch.org/t/another-way-to-implement-maml-model-agnostic-meta-learning/164439.
"""

import torch
from _report import finish, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
momentum = [torch.zeros_like(p) for p in model.parameters()]
for step in steps():
    loss = model(torch.randn(8, 4)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, m, g in zip(model.parameters(), momentum, gradients, strict=True):
            m.mul_(0.9).add_(g)
            p.sub_(m, alpha=1e-2)
    tell(step, loss)
finish(model, steps=step)
