"""A model whose attributes have the names of torch's methods, and whose own methods raise.

Follows github.com/iver56/torch-audiomentations/issues/49.
"""

import torch
from _report import finish, steps, tell
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.parameters, self.buffers, self.modules, self.children = {"lr": 1}, [1], None, 2
        self.named_parameters, self.named_modules, self.state_dict = 1, 3, 0
        self.training, self.name, self.device, self.register_forward_hook = "x", 3, "cuda:9", 1

    def __len__(self):
        raise RuntimeError("len")

    def __bool__(self):
        raise RuntimeError("bool")

    def __eq__(self, other):
        raise RuntimeError("eq")

    __hash__ = None

    def __iter__(self):
        raise RuntimeError("iter")

    def forward(self, x):
        return self.inner(x @ self.w)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd, self.head = Odd(), nn.Linear(4, 1)

    @property
    def __class__(self):
        raise RuntimeError("class")

    def forward(self, x):
        return self.head(self.odd(x))


model = Outer()
odd, head = model._modules["odd"], model._modules["head"]
optimizer = torch.optim.SGD([odd.w, *odd.inner.parameters(), *head.parameters()], lr=1e-2)
for step in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(odd.inner, head, steps=step)
