"""The workloads of the benches, and how long one of their steps keeps the processor busy."""

from __future__ import annotations

import ctypes
import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


class Workload(NamedTuple):
    """A model, the function that computes its loss, and its optimizer."""

    model: Any
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, d // self.heads).transpose(1, 2) for z in self.qkv(x).split(d, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(d), Attention(d, heads), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.relu, self.down = nn.ReLU(inplace=True), nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


def _squares(x):
    return lambda model: model(x).square().mean()


def mlp() -> Workload:
    """200 small modules: what a module's call costs."""
    model = nn.Sequential(*[one for _ in range(100) for one in (nn.Linear(64, 64), nn.ReLU())])
    return Workload(model, _squares(torch.randn(32, 64)), torch.optim.SGD(model.parameters(), lr=1e-3))


def charlm() -> Workload:
    """A character model of four blocks, 128 wide, batch 8 of 64."""
    model = nn.Sequential(nn.Embedding(256, 128), *(Block(128, 4) for _ in range(4)), nn.Linear(128, 256))
    loss = _squares(torch.randint(256, (8, 64)))
    return Workload(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


def convnet() -> Workload:
    """Three residual blocks that work in place, batch 32 of 16 x 16."""
    body = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), *body, nn.Flatten(), nn.Linear(1024, 10))
    loss = _squares(torch.randn(32, 1, 16, 16))
    return Workload(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def llama() -> Workload:
    """A Llama of transformers from its configuration: two layers, 128 wide, batch 2 of 64, called by keywords."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=1024, max_position_embeddings=128))
    ids = torch.randint(1024, (2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Workload(model, lambda m: m(input_ids=ids, labels=ids).loss, optimizer)


def _tower(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = _tower(8, 4), _tower(8, 1)

    def forward(self, x):
        return self.actor(x), self.critic(x)


def ppo() -> Workload:
    """Sixteen calls without gradients on four environments, then one update on all their samples."""

    def loss(model):
        states = []
        with torch.no_grad():
            x = torch.randn(4, 8)
            for _ in range(16):
                states.append(x)
                x = x + 0.1 * model(x)[0].repeat(1, 2)
        logits, values = model(torch.cat(states))
        return logits.log_softmax(-1)[:, 0].mean() + values.square().mean()

    model = ActorCritic()
    return Workload(model, loss, torch.optim.Adam(model.parameters(), lr=1e-3))


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = _tower(16, 64, 256), _tower(64, 1, 256)


def gan() -> Workload:
    """A generator and a discriminator, the latter trained within the loss of the former, with an optimizer of its own."""
    pair = Gan()
    of_discriminator = torch.optim.Adam(pair.discriminator.parameters(), lr=1e-3)

    def loss(model):
        made = model.generator(torch.randn(64, 16))
        of_discriminator.zero_grad()
        told = model.discriminator(torch.randn(64, 64)), model.discriminator(made.detach())
        (functional.softplus(-told[0]).mean() + functional.softplus(told[1]).mean()).backward()
        of_discriminator.step()
        return functional.softplus(-model.discriminator(made)).mean()

    return Workload(pair, loss, torch.optim.Adam(pair.generator.parameters(), lr=1e-3))


class Adapted(nn.Module):
    """A frozen Linear with an adapter of rank 4."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def lora() -> Workload:
    """The character model with adapters in its attention; all else is frozen."""
    frozen = charlm()
    frozen.model.requires_grad_(False)
    for block in frozen.model[1:-1]:
        block.attn.qkv, block.attn.proj = Adapted(block.attn.qkv), Adapted(block.attn.proj)
    trained = [parameter for parameter in frozen.model.parameters() if parameter.requires_grad]
    return Workload(frozen.model, frozen.loss, torch.optim.AdamW(trained, lr=1e-3))


def compiled() -> Workload:
    """The character model, compiled by inductor."""
    eager = charlm()
    return Workload(torch.compile(eager.model), eager.loss, eager.optimizer)


WORKLOADS = {"mlp": mlp, "charlm": charlm, "convnet": convnet, "llama": llama}
TRAINERS = {"ppo": ppo, "gan": gan, "lora": lora, "compiled": compiled}
"""Of other shapes: `tests/bench/claimed.py` looks at what hookd says that it costs there."""


def available() -> list[str]:
    return [name for name in WORKLOADS if name != "llama" or find_spec("transformers")]


class Job:
    """One training; see `steady`."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self._loss, self.optimizer = {**WORKLOADS, **TRAINERS}[name]()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self.model).backward()
        self.optimizer.step()

    def block(self, steps: int) -> float:
        """Train; return the CPU time of a step of this thread in ns."""
        began = time.thread_time_ns()
        for _ in range(steps):
            self.step()
        return (time.thread_time_ns() - began) / steps


def steady() -> None:
    """Use one thread, and make malloc keep its memory.

    By default malloc returns large blocks and requests them again at its own discretion, and the same step takes half as
    long again, depending on earlier allocations of anybody, even of a tool.
    """
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the highest that it takes
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
