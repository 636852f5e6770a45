"""No optimizer: the parameters are written to under no_grad, and their gradients let go.

Follows pytorch.org/tutorials/beginner/pytorch_with_examples.html.
"""

import torch
from _report import finish, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for step in steps():
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-2 * p.grad)
            p.grad = None
    tell(step, loss)
finish(model, steps=step, samples=8 * step, loss=loss.item())
