"""One of two ranks under DistributedDataParallel and gloo. replicas.py STORE [WIDTH]; RANK and WORLD_SIZE as torchrun.

SIGUSR1 makes this rank's forward of `second` slow, or quick again; SIGUSR2 changes a weight of `second` by one ulp.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
slow, flip = [False], []
signal.signal(signal.SIGUSR1, lambda *_: slow.__setitem__(0, not slow[0]))
signal.signal(signal.SIGUSR2, lambda *_: flip.append(1))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, width), nn.Linear(width, width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.norm(self.second(self.first(x).relu())).relu())


torch.set_num_threads(1)
torch.manual_seed(rank)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
net = Net(int(sys.argv[2]) if len(sys.argv) > 2 else 32)
net.second.register_forward_pre_hook(lambda *_: time.sleep(0.05) if slow[0] else None)
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
step, was_slow = 0, False
while True:
    step += 1
    time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    if flip:
        flip.clear()
        weight = net.second.weight.data.view(torch.int32)
        weight[3, 5] += 1
        print(f"flipped after step {step}", flush=True)
    if slow[0] and not was_slow:
        print(f"slow after step {step}", flush=True)
    was_slow = slow[0]
    if step == 1:
        print(f"rank {rank} trains", flush=True)
