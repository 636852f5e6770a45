"""Trains on one rank or two under gloo, and optionally clips from given steps on; each rank prints its checksum.

clipping.py {1,2} STEPS PAUSE [FROM:MAX_NORM…]; MAX_NORM `inf` ends it. STEPS may be the path of a file: when that is
there, the training ends, on all ranks after the same step, whose number is printed. With FULLY_SHARD in the environment
the parameters are sharded (FSDP2).
"""

import hashlib
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(rank, ranks, store, steps, pause, schedule):  # noqa: PLR0917
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    wrapped = model
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        if "FULLY_SHARD" in os.environ:
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        else:
            wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    limit = float("inf")
    step = 0
    while not is_over(step, steps, ranks):
        step += 1
        limit = schedule.get(step, limit)
        optimizer.zero_grad()
        (wrapped(torch.randn(8, 16, generator=generator)) - 3).square().mean().backward()
        if limit != float("inf"):
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if step % 10 == 0:
            print(f"rank {rank} step {step}", flush=True)
        time.sleep(pause * (rank + 1))  # one of them waits for the other
    print(f"rank {rank} over {step}", flush=True)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(whole.detach().numpy().tobytes())
    print(f"rank {rank} done {digest.hexdigest()}", flush=True)
    if ranks > 1:
        dist.barrier()
        os._exit(0)  # gloo's own end hangs now and then: once in eight runs, without hookd


def is_over(step, steps, ranks):
    over = torch.tensor(float(step >= int(steps) if steps.isdecimal() else os.path.exists(steps)))
    if ranks > 1:
        dist.all_reduce(over)
    return over > 0


if __name__ == "__main__":
    ranks, steps, pause = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    schedule = {int(step): float(limit) for step, limit in (word.split(":") for word in sys.argv[4:])}
    if ranks == 1:
        train(0, 1, None, steps, pause, schedule)
    else:
        with tempfile.TemporaryDirectory() as directory:
            arguments = (ranks, os.path.join(directory, "store"), steps, pause, schedule)
            multiprocessing.start_processes(train, arguments, ranks, start_method="fork")
