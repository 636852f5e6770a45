"""Accelerate on two ranks: accumulation by its context, batches that it shares out, and an evaluation whose results are gathered.

Follows huggingface.co/docs/accelerate/basic_tutorials/migration.
"""

import torch
from _counted import CALLS, Counted
from _report import arguments, finish, tell
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(Counted, nn.Sequential):
    pass


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = Model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step, losses = 0, []
while step < arguments.steps:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            step += 1
            if accelerator.is_main_process:
                tell(step, torch.stack(losses).mean())
            last, losses = torch.stack(losses).mean().item(), []
    model.eval()
    with torch.no_grad():
        for inputs, _ in loader:
            accelerator.gather_for_metrics(model(inputs))
    model.train()
rank = accelerator.process_index
finish(*[model] * accelerator.is_main_process, rank=rank, steps=step, micro_batches=2, loss=last, samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
accelerator.end_training()
