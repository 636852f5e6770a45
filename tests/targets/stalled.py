"""Two ranks; the second joins the all-reduce of each step only after it gets a line on stdin."""

import sys

import torch
import torch.distributed as dist
from torch import nn

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 4):
    optimizer.zero_grad()
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    gradient = model.weight.grad
    print(f"step {step} reduces", flush=True)
    if rank == 1:
        sys.stdin.readline()
    dist.all_reduce(gradient)
    print(f"step {step} sum {gradient.sum().item()}", flush=True)
    optimizer.step()
print("done", model.weight.sum().item(), flush=True)
dist.destroy_process_group()
