"""A NaN comes into the weight of a layer that is used and never called, as MultiheadAttention uses its out_proj.

Follows github.com/pytorch/pytorch/issues/78109.
"""

import torch
from _report import finish, steps, tell
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.proj = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.query(x), self.proj.weight, self.proj.bias)


model = nn.Sequential(nn.Linear(4, 4), Attention(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in steps():
    if step == 40:
        with torch.no_grad():
            model[1].proj.weight[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step, incident="1.proj parameter weight")
