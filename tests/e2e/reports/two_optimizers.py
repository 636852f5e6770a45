"""Muon steps the matrices and AdamW all else: of each layer the weight has one optimizer and the bias another.

Follows docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html.
"""

import torch
from _report import finish, norms, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() != 2]
optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]
samples = 0
for step in steps():
    model.zero_grad()
    x = torch.randn(8, 4)
    loss = (model(x) - x).square().mean()
    loss.backward()
    found = norms(**{"0": model[0], "2": model[2]})
    for optimizer in optimizers:
        optimizer.step()
    samples += len(x)
    tell(step, loss)
finish(model, steps=step, samples=samples, norms=found)
