"""One of two ranks that does all that hookd's plugins look for on a CPU. everything.py STORE; RANK and WORLD_SIZE as torchrun.

DistributedDataParallel under gloo, float16 autocast with a GradScaler, activation checkpointing, a validation after each tenth
step, a hook of somebody else, a module that changes its mode, a ReLU that is dead. SIGUSR1 makes the next output of `side` have a NaN: it is in no loss.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

rank = int(os.environ["RANK"])
poisoned = []
signal.signal(signal.SIGUSR1, lambda *_: poisoned.append(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(16, 32), nn.GELU()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.dying = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.side, self.last = nn.Identity(), nn.Linear(32, 1)
        nn.init.constant_(self.dying[0].bias, -100.0)

    def forward(self, x):
        x = self.act(self.first(x))
        x = x + checkpoint(self.block, x, use_reentrant=False)
        self.side(x.detach() * float("nan") if poisoned and poisoned.pop() else x.detach())
        return self.last(x + self.dying(x))


torch.set_num_threads(1)
torch.manual_seed(rank)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
net = Net()
net.last.register_forward_hook(lambda *_: None)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
step = 0
while True:
    step += 1
    time.sleep(0.01)
    net.side.train(step % 10 < 5)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 16)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        with torch.no_grad():
            net(torch.randn(8, 16))
    if step == 1:
        print(f"rank {rank} trains", flush=True)
