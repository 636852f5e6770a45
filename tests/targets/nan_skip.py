"""Two gloo ranks; once the file POISON is there, the batch of one rank is bad once. nan_skip.py POISON STOP.

Each rank prints the steps in which no weight has moved, whether all are finite in the end, and a hash of them. The file
STOP ends the training, on both ranks after the same step.
"""

import hashlib
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from clipping import is_over
from torch import multiprocessing, nn

RANKS = 2


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(rank, store, poison, stop):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    step, is_due = 0, rank == 1
    while not is_over(step, stop, RANKS):
        step += 1
        batch = torch.randn(4, 8, generator=generator)
        if is_due and os.path.exists(poison):
            is_due, batch[0, 0] = False, float("nan")
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        before = weights(model)
        optimizer.step()
        if torch.equal(before, weights(model)):
            print(f"rank {rank} still {step}", flush=True)
        if step % 10 == 0:
            print(f"rank {rank} step {step}", flush=True)
        time.sleep(0.01)
    last = weights(model)
    print(f"rank {rank} finite {bool(last.isfinite().all())} {hashlib.sha256(last.numpy().tobytes()).hexdigest()}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's own end hangs now and then: once in eight runs, without hookd


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        arguments = (os.path.join(directory, "store"), *sys.argv[1:])
        multiprocessing.start_processes(train, arguments, RANKS, start_method="fork")
