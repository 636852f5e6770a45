"""Train a small transformer to continue Python source, on a CPU.

This is an ordinary script that does not use hookd.

    python examples/train.py                   # until SIGTERM, which lets the step in progress finish
    kill -USR1 PID                             # causes a fault in one layer: its next output has a NaN
    python examples/train.py --steps 200 --nan-at 120      # the same, reproducible

It prints `step N loss L` for each step and at the end `done N SHA`, the SHA-256 of all its weights. Two runs with the
same seed, number of steps and step of the fault print the same SHA.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import signal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

CONTEXT, BATCH, WIDTH, HEADS, DEPTH = 64, 8, 96, 4, 3


class Attention(nn.Module):
    """Causal self-attention over x[B, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x."""
        size, length, _ = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(size, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform x[B, T, WIDTH]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, T, 256] of the byte that follows each of tokens [B, T]."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def corpus() -> Tensor:
    """Return the sources of modules of the standard library (a to d) as one long vector of bytes."""
    library = pathlib.Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(library.glob("[a-d]*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def spoil(layer: nn.Module) -> None:
    """Set one element of the layer's next output to NaN, once, as a flipped bit or a bad kernel would."""

    def fault(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        handle.remove()
        output = output.clone()
        output.view(-1)[0] = float("nan")
        return output

    handle = layer.register_forward_hook(fault)


def train(model: Model, args: argparse.Namespace) -> int:
    """Train until a signal or the number of steps ends it; return the number of steps taken."""
    asked: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _frame: asked.add(received))
    data, generator = corpus(), torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while signal.SIGTERM not in asked and not 0 < args.steps <= step:
        step += 1
        if signal.SIGUSR1 in asked or step == args.nan_at:
            asked.discard(signal.SIGUSR1)
            spoil(model.get_submodule(args.nan_in))
            print(f"fault in {args.nan_in} at step {step}", flush=True)
        at = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator).tolist()
        text = torch.stack([data[i : i + CONTEXT + 1] for i in at])
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if torch.isfinite(loss):  # a careful script skips a step with a bad loss
            optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    return step


def checksum(model: nn.Module) -> str:
    """Return the SHA-256 of the bits of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + bytes(value.contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def main() -> None:
    """Read the arguments, train, print the checksum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="number of steps; 0: until SIGTERM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nan-at", type=int, default=0, metavar="STEP", help="inject a fault at this step")
    parser.add_argument("--nan-in", default="blocks.2.down", metavar="LAYER", help="layer of the fault")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Model()
    steps = train(model, args)
    print("done", steps, checksum(model), flush=True)


if __name__ == "__main__":
    main()
