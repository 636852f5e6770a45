"""Largest batch size that is not yet wasteful. See docs/tutorials/noise.md."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hookd import Context, Plugin, PluginError, hookimpl, parameters_in


class Noise(Plugin):
    """The simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1, from accumulated gradients."""

    name = "noise"
    requires_api = "1.0"
    sampled = ("loss_done",)
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the size of a micro-batch, and the decay of the averages."""
        self.context = context
        self.batch, self.keep = context.option("batch", 1, least=1), context.option("keep", 0.95)
        if not 0 <= self.keep < 1:
            raise PluginError(f"noise: keep must be at least 0 and below 1, not {self.keep}")
        if context.world_size > 1:
            raise PluginError("noise: only jobs of one rank are supported: the reduced gradients are not known")
        self.scale = context.gauge("scale_samples", "Simple noise scale of the gradient.").labels()
        self.squares: list[Tensor] | None = None  # None until the first complete step begins
        self.square = self.trace = 0.0

    @hookimpl
    def loss_done(self) -> None:
        """Compute, on its device, the squared norm of the gradient accumulated so far."""
        grads = [p.grad for _, model in self.context.models() for _, p in parameters_in(model) if p.grad is not None]
        if grads and self.squares is not None:
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
            self.squares.append(torch.stack(norms).square().sum())

    @hookimpl
    def step_post(self) -> None:
        """Request the norms of the first micro-batch and of all of them; a new step begins."""
        if self.squares and len(self.squares) > 1:
            count = len(self.squares)
            self.context.later([self.squares[0], self.squares[-1]], lambda numbers: self._show(count, *numbers))
        self.squares = []

    def _show(self, count: int, first: float, whole: float) -> None:
        few, many = self.batch, self.batch * count
        small, big = first, whole / count**2
        if math.isfinite(small + big):
            square = (many * big - few * small) / (many - few)
            trace = (small - big) / (1 / few - 1 / many)
            self.square += (1 - self.keep) * (square - self.square)
            self.trace += (1 - self.keep) * (trace - self.trace)
            self.scale.set(self.trace / self.square if self.square > 0 else math.nan)
