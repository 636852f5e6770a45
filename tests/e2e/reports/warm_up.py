"""Parts of a model are called once before the model is, to find out a shape.

Follows github.com/TylerYep/torchinfo.
"""

import torch
from _report import finish, steps, tell
from torch import nn

features = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
with torch.no_grad():
    features[0](torch.randn(1, 4))
    width = features(torch.randn(1, 4)).shape[1]
model = nn.Sequential(features, nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in steps():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    tell(step, loss)
finish(model, steps=step, modules=["(root)", "0", "0.0", "0.1", "1"])
