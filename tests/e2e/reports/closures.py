"""LBFGS with a line search: each step calls a closure with a forward and a backward many times.

Follows docs.pytorch.org/docs/stable/optim.html#optimizer-step-closure.
"""

import torch
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn


class Model(Counted, nn.Sequential):
    pass


model = Model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
losses = []
for step in steps():
    x = torch.randn(16, 4)

    def closure(x=x):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2])
        loss.backward()
        losses.append(loss.detach())
        return loss

    tell(step, optimizer.step(closure))
finish(model, steps=step, samples=CALLS["samples"], calls_of={"(root)": CALLS["training"]})
