"""An exponential moving average of the weights in a copy of the model, which is what is validated.

Follows timm/utils/model_ema.py (ModelEmaV3) and its train.py.
"""

import copy

import torch
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn


class Net(Counted, nn.Sequential):
    pass


class ModelEmaV3(nn.Module):
    """Holds a copy of a model whose weights follow those of the model slowly."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.lerp_(value, 0.1)
            else:
                mean.copy_(value)

    def forward(self, x):
        return self.module(x)


model = Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
averaged = ModelEmaV3(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
validated = 0
for step in steps():
    x = torch.randn(8, 3, 8, 8)
    loss = nn.functional.cross_entropy(model(x), (x.mean((1, 2, 3)) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averaged.update(model)
    tell(step, loss)
    if step % 20 == 0:
        with torch.no_grad():
            averaged(torch.randn(8, 3, 8, 8))
        validated += 1
finish(model, averaged, steps=step, micro_batches=1, loss=loss.item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"#ModelEmaV3.(root)": validated})  # fmt: skip
