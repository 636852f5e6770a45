"""One of two ranks that train the transformer of examples/train.py together, for pictures. pictured.py EXAMPLE STORE."""

import importlib.util
import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world)
model = torch.nn.parallel.DistributedDataParallel(example.Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data, generator = example.corpus(), torch.Generator().manual_seed(rank)
step = 0
while True:
    step += 1
    at = torch.randint(len(data) - example.CONTEXT, (example.BATCH,), generator=generator).tolist()
    text = torch.stack([data[i : i + example.CONTEXT + 1] for i in at])
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        print(f"rank {rank} trains", flush=True)
