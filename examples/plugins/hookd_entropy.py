"""Entropy of attention heads: 1 for uniform attention, 0 for a single position. See docs/tutorials/entropy.md."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hookd import Context, Module, Plugin, hookimpl, peek


class Entropy(Plugin):
    """Entropy of each attention head, relative to its maximum."""

    name = "entropy"
    requires_api = "1.0"
    sampled = ("forward",)
    every = 50

    @hookimpl
    def configure(self, context: Context) -> None:
        """Declare the metric."""
        self.context = context
        self.entropy = context.gauge("ratio", "Entropy of the attention, relative to its maximum.", ["module", "head"])

    @hookimpl
    def select(self, module: Module) -> bool:
        """Select torch's own attention with queries, keys and values of one width."""
        attention = module.torch()
        return issubclass(type(attention), nn.MultiheadAttention) and peek(attention, "in_proj_weight") is not None

    @hookimpl
    def forward(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Recompute the attention weights, which fast attention kernels do not keep."""
        attention, arguments = module.torch(), dict(zip(("query", "key"), inputs), **kwargs)
        if attention is not None and arguments["query"].dim() == 3:
            heads = entropy(attention, arguments["query"], arguments["key"], arguments.get("attn_mask"))
            self.context.later([heads], lambda numbers: self._show(module.name, numbers))

    def _show(self, name: str, numbers: list[float]) -> None:
        for head, number in enumerate(numbers):
            self.entropy.labels(name, str(head)).set(number)


def entropy(attention: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return [heads] the mean entropy of each head over log(keys); query and key are [batch, length, width]."""
    if not peek(attention, "batch_first"):
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    weights, bias = peek(attention, "in_proj_weight").chunk(3), peek(attention, "in_proj_bias")
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    q, k = (nn.functional.linear(x, w, b) for x, w, b in zip((query, key), weights, biases))
    q, k = (x.view(*x.shape[:2], peek(attention, "num_heads"), -1).transpose(1, 2) for x in (q, k))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None and mask.dim() == 2:
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    nats: Tensor = torch.special.entr(scores.softmax(-1)).sum(-1).mean((0, 2))
    return nats / math.log(max(2, key.shape[1]))
