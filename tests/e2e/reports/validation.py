"""Gradients of four micro-batches for each step, and a validation after every tenth step.

Follows huggingface.co/docs/accelerate/usage_guides/gradient_accumulation.
"""

import torch
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCHES = 4


class Model(Counted, nn.Sequential):
    pass


model = Model(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8)
for step in steps():
    losses = []
    for _ in range(MICRO_BATCHES):
        loss = nn.functional.mse_loss(model(x := torch.randn(8, 4)), x[:, :1])
        (loss / MICRO_BATCHES).backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    tell(step, torch.stack(losses).mean())
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            for (x,) in held_out:
                model(x)
        model.train()
finish(model, steps=step, micro_batches=MICRO_BATCHES, loss=torch.stack(losses).mean().item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"], "3": CALLS["inference"]})  # fmt: skip
