"""Distribution of the tokens over the experts of a mixture. See docs/tutorials/experts.md."""

from __future__ import annotations

from typing import Any

import torch

from hookd import Context, Module, Plugin, hookimpl, tensors


class Experts(Plugin):
    """Share of the tokens that each expert gets, and the imbalance of the shares."""

    name = "experts"
    requires_api = "1.0"
    sampled = ("forward",)
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read which modules are routers, and the number of experts for each token."""
        self.context = context
        self.routers = context.globs("modules", "*gate|*router")
        self.top = context.option("top", 2, least=1)
        self.load = context.gauge("load_ratio", "Share of the tokens that go to an expert.", ["module", "expert"])
        self.imbalance = context.gauge("imbalance_ratio", "The fullest expert's load over the mean.", ["module"])

    @hookimpl
    def select(self, module: Module) -> bool:
        """Select the routers."""
        return self.routers.match(module.name)

    @hookimpl
    def forward(self, module: Module, output: Any) -> None:
        """Count, on their device, the choices that follow from a router's scores [..., experts]."""
        scores = next(iter(tensors(output)), None)
        if scores is None or scores.dim() < 2:
            return
        experts = scores.shape[-1]
        chosen = scores.topk(min(self.top, experts), -1).indices.reshape(-1)
        counts = torch.zeros(experts, device=scores.device).scatter_add_(
            0, chosen, torch.ones_like(chosen, dtype=torch.float32)
        )
        self.context.later([counts / counts.sum()], lambda shares: self._show(module.name, shares))

    def _show(self, name: str, shares: list[float]) -> None:
        for expert, share in enumerate(shares):
            self.load.labels(name, str(expert)).set(share)
        self.imbalance.labels(name).set(max(shares) * len(shares))
