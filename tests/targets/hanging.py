"""Two ranks under gloo; the second stops in blocks.2 while a file exists. hanging.py DIRECTORY

DIRECTORY/sleep: it sleeps there. DIRECTORY/native: it sleeps once for some seconds in native code that holds the GIL.
"""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

directory = sys.argv[1]
for rank in range(2):  # noqa: B007  a rank leaves with its number
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        break
else:
    os.wait()
    sys.exit()
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stand(_module, _inputs):
    while os.path.exists(f"{directory}/sleep"):
        time.sleep(0.01)
    if os.path.exists(f"{directory}/native"):
        os.unlink(f"{directory}/native")
        ctypes.PyDLL(None).sleep(6)


net = Net()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
if rank == 1:
    net.blocks[2].register_forward_pre_hook(stand)
print(f"rank {rank} is {os.getpid()}", flush=True)
while True:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
