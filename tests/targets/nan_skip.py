"""One of two gloo ranks under hookd's `policy=skip`; the batch of one rank is bad once. nan_skip.py RANK STORE.

Prints the step at which each rank skipped, as a sum over its weights before and after, and a hash of them at the end.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import hookd


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main(rank, store):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    hookd.start([("nan", {"policy": "skip"})], run="ranks")
    still = []
    for step in range(1, 9):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        if (rank, step) == (1, 4):
            batch[0, 0] = float("nan")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        before = weights(model)
        optimizer.step()
        if torch.equal(before, weights(model)):
            still.append(step)
    hookd.stop()
    last = weights(model)
    print("still", still, "finite", bool(last.isfinite().all()), hashlib.sha256(last.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
