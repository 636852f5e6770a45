"""Trainings as people write them for a GPU, which know nothing of hookd and end with a checksum.

    python tests/gpu/trainings.py NAME [--steps N] [--device cuda|cpu] [--tiny] [--pause S]

Everything is deterministic, so the checksum of two runs is the same: of weights, optimizer, losses and random state. A training that the
machine cannot make ends with code 77 and says why.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA is initialized; torch's notes on reproducibility

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

CANNOT = 77
"""Exit code of a training that this machine cannot make."""


class Size:
    """The size of the models: at least 10^9 parameters for `transformer`, or tiny for a machine without a GPU."""

    def __init__(self, *, tiny: bool) -> None:
        self.width, self.layers, self.words = (64, 2, 256) if tiny else (2304, 16, 32_000)
        self.small_width, self.small_layers = (32, 2) if tiny else (512, 8)
        self.batch, self.length = (2, 16) if tiny else (4, 512)


class Block(nn.Module):
    """A block of a transformer; with `repeats`, its forward is made again in the backward."""

    def __init__(self, width: int, *, repeats: bool = False) -> None:
        super().__init__()
        self.repeats, self.heads = repeats, max(1, width // 128)
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width] of the same."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape."""
        return checkpoint(self.body, x, use_reentrant=False) if self.repeats else self.body(x)


class Transformer(nn.Module):
    """A language model of `layers` blocks."""

    def __init__(self, width: int, layers: int, words: int, *, repeats: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, repeats=repeats) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, words] logits of [batch, length] ids."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Job:
    """A device, a number of steps and a size, for a training.

    Attributes:
        device: on which it runs.
        losses: of its steps, on the device.
    """

    def __init__(self, device: str, steps: int, *, tiny: bool, pause_s: float = 0.0) -> None:
        self.device, self.steps, self.size = torch.device(device), steps, Size(tiny=tiny)
        self._pause_s = pause_s
        self.losses: list[torch.Tensor] = []

    def ids(self) -> torch.Tensor:
        """Return [batch, length + 1] random ids."""
        return torch.randint(self.size.words, (self.size.batch, self.size.length + 1), device=self.device)

    def small(self, *, repeats: bool = False) -> Transformer:
        """Return a model of some ten million parameters."""
        return Transformer(self.size.small_width, self.size.small_layers, self.size.words, repeats=repeats).to(
            self.device
        )

    def each_step(self) -> range:
        """Return the steps, and print the number of each that is over, for whoever waits for it."""
        return range(1, self.steps + 1)

    def done(self, step: int, loss: torch.Tensor) -> None:
        """Note a step."""
        self.losses.append(loss.detach().float())
        print(f"step {step}", flush=True)
        time.sleep(self._pause_s)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of a language model."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def learn(
    job: Job, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Train in the ordinary way."""
    for step in job.each_step():
        optimizer.zero_grad()
        loss = loss_of(call, job.ids())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        job.done(step, loss)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of most of these trainings."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def transformer(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A transformer of 1.17 10^9 parameters in bfloat16."""
    model = Transformer(job.size.width, job.size.layers, job.size.words).to(job.device, torch.bfloat16)
    optimizer = adam(model)
    learn(job, model, model, optimizer)
    return model, optimizer


def ddp(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """DistributedDataParallel with NCCL, one rank."""
    from torch import distributed

    with tempfile.TemporaryDirectory() as scratch:
        store = distributed.FileStore(os.path.join(scratch, "store"), 1)
        distributed.init_process_group(
            "nccl" if job.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        model = nn.parallel.DistributedDataParallel(job.small())
        optimizer = adam(model)
        learn(job, model, model, optimizer)
        distributed.destroy_process_group()
    return model, optimizer


def scaler(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """float16 under autocast with a GradScaler, whose first steps overflow."""
    model = job.small()
    optimizer = adam(model)
    scale = torch.amp.GradScaler(job.device.type, init_scale=2.0**24)
    dtype = torch.float16 if job.device.type == "cuda" else torch.bfloat16
    for step in job.each_step():
        optimizer.zero_grad()
        with torch.autocast(job.device.type, dtype):
            loss = loss_of(model, job.ids())
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        job.done(step, loss)
    return model, optimizer


def checkpointing(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Activation checkpointing of every block."""
    model = job.small(repeats=True)
    optimizer = adam(model)
    learn(job, model, model, optimizer)
    return model, optimizer


def compiled(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """torch.compile of the whole model."""
    model = job.small()
    optimizer = adam(model)
    learn(job, model, torch.compile(model), optimizer)
    return model, optimizer


def graphs(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A CUDA graph of forward and backward, replayed at each step."""
    if job.device.type != "cuda":
        cannot("CUDA graphs need a GPU")
    model, ids = job.small(), job.ids()
    for block in model.blocks:
        block.drop.p = 0.0
    optimizer = adam(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_of(model, ids).backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = loss_of(model, ids)
        loss.backward()
    for step in job.each_step():
        ids.copy_(job.ids())
        graph.replay()
        optimizer.step()
        job.done(step, loss.clone())
    return model, optimizer


def streams(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Half of the batch on a stream of its own."""
    if job.device.type != "cuda":
        cannot("streams need a GPU")
    model, side = job.small(), torch.cuda.Stream()
    optimizer = adam(model)
    for step in job.each_step():
        optimizer.zero_grad()
        ids = job.ids()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = loss_of(model, ids[: len(ids) // 2])
        second = loss_of(model, ids[len(ids) // 2 :])
        torch.cuda.current_stream().wait_stream(side)
        first.record_stream(torch.cuda.current_stream())
        loss = first + second
        loss.backward()
        optimizer.step()
        job.done(step, loss)
    return model, optimizer


TRAININGS: dict[str, Callable[[Job], tuple[nn.Module, torch.optim.Optimizer]]] = {
    one.__name__: one for one in (transformer, ddp, scaler, checkpointing, compiled, graphs, streams)
}


def cannot(why: str) -> None:
    """End this process: the machine cannot make the training."""
    print(why, flush=True)
    sys.exit(CANNOT)


def checksum(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the digest of all that the training has made."""
    found = hashlib.blake2b(digest_size=8)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if job.device.type == "cuda" else [])]
    for tensor in (*model.state_dict().values(), *states, *job.losses, *generators):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    job = Job(given.device, given.steps, tiny=given.tiny, pause_s=given.pause)
    print(f"checksum {checksum(job, *TRAININGS[given.name](job))}", flush=True)


if __name__ == "__main__":
    main()
