"""A model that calls itself for each level of a tree.

Follows github.com/pytorch/examples/tree/main/snli, whose parser composes what it has composed.
"""

import torch
from _report import finish, steps, tell
from torch import nn


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf, self.join = nn.Linear(4, 4), nn.Linear(8, 4)

    def forward(self, x, levels):
        if levels == 0:
            return torch.tanh(self.leaf(x))
        left, right = self(x, levels - 1), self(-x, levels - 1)
        return torch.tanh(self.join(torch.cat([left, right], 1)))


model = Tree()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4), 3).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step, samples=8 * step, calls_of={"(root)": 15 * step, "leaf": 8 * step, "join": 7 * step})
