"""Two ranks under gloo, each with a data loader's worker. ranks.py {spawn,fork,forkserver} | rank [STORE]."""

import ctypes
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    def __len__(self):
        return 10**8

    def __getitem__(self, i):
        return torch.full((16,), i / 10**8)


def rank(i, n, store, method):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}" if store else None, rank=i, world_size=n)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Items(), batch_size=8, num_workers=1, multiprocessing_context=method)
    for step, x in enumerate(loader):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        if step == 0:
            print(f"rank {i} trains", flush=True)


def rename(title):
    """Write a title over the command line, as setproctitle does (PR_SET_MM_ARG_START needs no such privilege here)."""
    with open("/proc/self/stat") as file:
        start, end = (int(field) for field in file.read().rpartition(")")[2].split()[45:47])
    ctypes.memmove(start, title.encode().ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    if "EXEC_TITLE" in os.environ:
        rename(os.environ["EXEC_TITLE"])
    if sys.argv[1] == "rank":
        store = sys.argv[2] if len(sys.argv) > 2 else None
        rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), store, "fork")
    else:
        with tempfile.TemporaryDirectory() as directory:
            workers = "fork" if sys.argv[1] == "forkserver" else sys.argv[1]  # else each rank has a server, too
            arguments = (2, os.path.join(directory, "store"), workers)
            multiprocessing.start_processes(rank, arguments, 2, start_method=sys.argv[1])
