"""How many samples a batch could have before more of them are wasted. See docs/tutorials/noise.md."""

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
        """Read how large a micro-batch is, and for how long to average."""
        self.context = context
        self.batch, self.keep = context.option("batch", 1), context.option("keep", 0.95)
        if self.batch < 1 or not 0 <= self.keep < 1:
            raise PluginError("noise: batch must be at least 1, and keep at least 0 and below 1")
        if context.world_size > 1:
            raise PluginError("noise: it is for jobs of one rank: it cannot know which gradients were reduced")
        self.scale = context.gauge("scale_samples", "Simple noise scale of the gradient.").labels()
        self.squares: list[Tensor] | None = None  # None until a whole step begins
        self.square = self.trace = 0.0

    @hookimpl
    def loss_done(self) -> None:
        """Take the squared norm of what is accumulated so far, where it is."""
        grads = [p.grad for _, model in self.context.models() for _, p in parameters_in(model) if p.grad is not None]
        if grads and self.squares is not None:
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
            self.squares.append(torch.stack(norms).square().sum())

    @hookimpl
    def step_post(self) -> None:
        """Ask for the numbers of the first micro-batch and of all; a new step begins."""
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
