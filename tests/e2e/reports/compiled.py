"""A model compiled by torch.compile, in a training with a validation.

Follows pytorch.org/tutorials/intermediate/torch_compile_tutorial.html; `aot_eager` needs no compiler.
"""

import torch
from _report import finish, steps, tell
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
validated = 0
for step in steps():
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(compiled(x), x[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss)
    if step % 20 == 0:
        with torch.no_grad():
            compiled(torch.randn(8, 4))
        validated += 1
finish(
    model,
    steps=step,
    micro_batches=1,
    loss=loss.item(),
    samples=8 * step,
    calls_of={"(root)": step},
    inferred={"(root)": validated},
)
