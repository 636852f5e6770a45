"""A cell that calls itself, to three quarters of Python's recursion limit.

Follows github.com/siliu-group/pic-challenge-baseline/issues/1, where a layer per level goes deeper than Python allows.
"""

import sys

import torch
from _report import finish, steps, tell
from torch import nn

LEVELS = (
    sys.getrecursionlimit() * 3 // 4 // 4
)  # a level takes four: torch's two frames, `forward`, and on CPython 3.11 the call itself


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, levels):
        x = torch.tanh(self.mix(x))
        return self(x, levels - 1) if levels else x


model = Cell()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4), LEVELS - 1).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step, samples=8 * step, calls_of={"(root)": LEVELS * step, "mix": LEVELS * step})
