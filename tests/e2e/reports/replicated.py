"""DistributedDataParallel on two ranks, with two micro-batches for each step, of which only the last one is reduced.

Follows docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#no_sync.
"""

import contextlib

import torch
import torch.distributed as dist
from _counted import CALLS, Counted
from _report import finish, steps, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(Counted, nn.Sequential):
    pass


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in steps():
    losses = []
    for micro_batch in range(2):
        with model.no_sync() if micro_batch == 0 else contextlib.nullcontext():
            x = torch.randn(8 + rank, 4)
            loss = nn.functional.mse_loss(model(x), x[:, :1])
            (loss / 2).backward()
            losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        tell(step, torch.stack(losses).mean())
    if step % 20 == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
        model.train()
finish(*[model] * (rank == 0), rank=rank, steps=step, micro_batches=2, loss=torch.stack(losses).mean().item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
dist.destroy_process_group()
