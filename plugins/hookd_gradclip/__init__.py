"""Clips gradients of a training that does not, or says what clipping would do. Runs in the target; changes training.

    hookd_gradclip_norm                  the norm before clipping (mode value: the largest magnitude; mode module: the
                                         largest norm of the step)
    hookd_gradclip_scale                 the (smallest) factor of the step; 1 where nothing was clipped; not in mode value
    hookd_gradclip_clipped_total{mode}   how often something was clipped, or would have been in a dry run:
                                         optimizer steps, and in mode module gradients
    hookd_gradclip_nonfinite_total       steps, or gradients, left as they are because of a NaN or an infinity

Modes (`mode=...`):
- norm (the default): the norm of all gradients that the optimizer is about to use is at most `max_norm`, bit for bit as
  `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)` before the step. `order=optimizer` sums in
  the order of the optimizer's groups instead of the model's, which gives other bits.
- value: each element lies within +-`clip_value`, as `torch.nn.utils.clip_grad_value_`.
- module: each gradient that flows from a module into one of its inputs has a norm of at most `max_norm`, as a full
  backward hook would do it; `modules=GLOB|GLOB` says which modules. Not the same as clipping parameters' gradients.

`dry_run=true` measures and changes nothing: the default where no setting was given at all. With a GradScaler the
limits hold for the unscaled gradients, with fused optimizers, too (not so in mode module, which sees scaled ones).
Non-finite gradients are never touched: a clipped
infinity would be a silent zero or NaN. Each optimizer is clipped by itself. LBFGS and other optimizers that compute
gradients inside their step have none before it, so nothing is clipped there; the log says so once.
"""

from __future__ import annotations

import math
from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn import utils

from hookd import Context, Module, Plugin, PluginError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Parameter
    from torch.optim import Optimizer

SETTINGS = ("mode", "max_norm", "norm_type", "clip_value", "order", "modules")
EPS = 1e-6
"""As in torch/nn/utils/clip_grad.py, 2.13: the limit is divided by (norm + 1e-6)."""


class GradClip(Plugin):
    """Clips by global norm, by value, or module by module."""

    name = "gradclip"
    mutates = True

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options.

        Raises:
            PluginError: a limit is missing or not positive, or this is a job of several ranks and it is no dry run.
        """
        self.context = context
        option = context.option
        self.mode = option("mode", "norm", ("norm", "value", "module"))
        self.order = option("order", "model", ("model", "optimizer"))
        self.norm_type = option("norm_type", 2.0)
        if not self.norm_type > 0:
            raise PluginError(f"gradclip: norm_type must be positive, or inf, not {self.norm_type:g}")
        self.globs = option("modules", "*").split("|")
        self.dry_run = option("dry_run", not any(name in context.options for name in SETTINGS))
        self.limit = self._limit(option("max_norm", 0.0), option("clip_value", 0.0))
        self._refuse_ranks(context.world_size)
        self.norm = context.gauge("norm", "Norm of the gradients before clipping.")
        self.scale = context.gauge("scale", "Factor that the gradients were multiplied by.")
        self.clipped = context.counter("clipped", "Times that something was, or would have been, clipped.", ["mode"])
        self.nonfinite = context.counter("nonfinite", "Times that non-finite gradients were left as they were.")
        self.clipped_here = self.clipped.labels(self.mode)
        self.clipped_here.inc(0)
        self.nonfinite.inc(0)
        self.largest = 0.0  # of the norms of this step, in mode module
        self.later = Later()
        self.has_said_none = False
        context.log(f"{'measuring only' if self.dry_run else 'clipping'}: mode={self.mode}, limit={self.limit:g}")

    def _limit(self, max_norm: float, clip_value: float) -> float:
        name, limit = ("clip_value", clip_value) if self.mode == "value" else ("max_norm", max_norm)
        if not limit and self.dry_run and name not in self.context.options:
            return 1.0
        if not 0 < limit < math.inf:
            raise PluginError(f"gradclip: mode={self.mode} needs a positive {name}", hint=f"{name}=1.0")
        return limit

    def _refuse_ranks(self, ranks: int) -> None:
        """Refuse to change training on one of several ranks: a step's difference between them parts their weights."""
        if distributed.is_available() and distributed.is_initialized():
            ranks = max(ranks, distributed.get_world_size())
        if ranks > 1 and not self.dry_run:
            raise PluginError(
                f"gradclip: this job has {ranks} ranks, and clipping must begin on all of them at one step",
                hint="hookd cannot agree on that step yet; dry_run=true measures what would be clipped",
            )

    @hookimpl
    def select(self, module: Module) -> bool:
        """Ask for module events in mode module only: they put hooks on the autograd graph."""
        return self.mode == "module" and any(fnmatchcase(module.name, glob) for glob in self.globs)

    @hookimpl
    def backward(self, grad_input: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Scale each gradient that leaves the module."""
        norms = [None if g is None else vector_norm(g, self.norm_type) for g in grad_input]
        for norm in norms:
            if norm is not None:
                self._measured(norm)
        if self.dry_run:
            return None
        return tuple(g if n is None else g * factor(n, self.limit).to(g.dtype) for g, n in zip(grad_input, norms))

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Clip the gradients that the optimizer is about to use."""
        self._refuse_ranks(1)
        for norm in self.later.take():
            self._record(norm)
        if self.mode == "module":
            self._publish(self.largest)
            self.largest = 0.0
            return
        parameters = [p for p in self._parameters(optimizer) if p.grad is not None]
        if parameters:
            self._clip(parameters, getattr(optimizer, "grad_scale", None))
        elif not self.has_said_none:
            self.has_said_none = True
            self.context.log(f"{type(optimizer).__name__} has no gradients before its step: nothing to clip")

    def _parameters(self, optimizer: Optimizer) -> list[Parameter]:
        if self.order == "model":
            return [parameter for _, parameter in self.context.ordered_parameters(optimizer)]
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def _clip(self, parameters: list[Parameter], grad_scale: Tensor | None) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(g.layout != torch.strided for g in grads):
            raise PluginError("gradclip: sparse gradients cannot be clipped, by torch's own functions neither")
        norm = total_norm(grads, math.inf if self.mode == "value" else self.norm_type)
        if grad_scale is not None:  # a fused optimizer will divide by it, so the limit holds for the quotient
            norm = norm / grad_scale.to(norm.device)
        self._measured(norm)
        if self.dry_run:
            return
        # What is not finite counts as zero here, for which nothing is clipped; and no device is waited for.
        norm = torch.where(norm.isfinite(), norm, torch.zeros_like(norm))
        if self.mode == "norm":
            scale_down(parameters, self.limit, norm)
        elif grad_scale is None and on_host(norm):
            if norm.item() > self.limit:
                utils.clip_grad_value_(parameters, self.limit)
        else:
            self._clip_values(grads, norm, 1.0 if grad_scale is None else grad_scale)

    def _clip_values(self, grads: list[Tensor], largest: Tensor, scale: Tensor | float) -> None:
        """Clip without knowing, on the host, what the limit in scaled gradients is."""
        bound = torch.where(largest > self.limit, self.limit, math.inf) * scale
        for grad in grads:
            own = bound.to(grad.device, grad.dtype)
            grad.clamp_(min=-own, max=own)

    def _measured(self, norm: Tensor) -> None:
        if on_host(norm):
            self._record(norm.item())
        else:
            self.later.put(norm)

    def _record(self, norm: float) -> None:
        if not math.isfinite(norm):
            self.nonfinite.inc()
        elif norm > self.limit:
            self.clipped_here.inc()
        if self.mode == "module":
            self.largest = max(self.largest, norm)
        else:
            self._publish(norm)

    def _publish(self, norm: float) -> None:
        self.norm.set(norm)
        if self.mode != "value":
            self.scale.set(min(1.0, self.limit / (norm + EPS)) if math.isfinite(norm) else 1.0)


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Give the norm of all gradients as one vector, as the first half of `clip_grad_norm_` does."""
    if hasattr(utils, "get_total_norm"):
        return utils.get_total_norm(grads, norm_type)
    norms = [torch.linalg.vector_norm(g, norm_type).to(grads[0].device) for g in grads]  # torch < 2.6
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return whole


def scale_down(parameters: list[Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients to `max_norm` if their `norm` is larger, as the second half of `clip_grad_norm_` does."""
    if hasattr(utils, "clip_grads_with_norm_"):
        utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    for grad in [p.grad for p in parameters if p.grad is not None]:  # torch < 2.6
        grad.mul_((max_norm / (norm + EPS)).clamp(max=1.0).to(grad.device))


def vector_norm(grad: Tensor, norm_type: float) -> Tensor:
    """Give the norm of one gradient, [] float32 or wider: in float16 the norm of 70 thousand ones is infinite."""
    dtype = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=dtype)
    return norm


def factor(norm: Tensor, limit: float) -> Tensor:
    """Give what brings a gradient of this norm to the limit: at most 1, and 1 for a norm that is not finite."""
    return torch.where(norm.isfinite(), (limit / (norm + EPS)).clamp(max=1.0), torch.ones_like(norm))


class Later:
    """Reads norms from a device without waiting for it: asked for now, taken when they have arrived."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Tensor, Any]] = deque()

    def put(self, norm: Tensor) -> None:
        """Send one 0-dim tensor on its way."""
        if not norm.is_cuda:
            self.waiting.append((norm.detach(), None))
            return
        with torch.cuda.device(norm.device):
            host = torch.empty((), dtype=norm.dtype, pin_memory=True).copy_(norm.detach(), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.waiting.append((host, event))

    def take(self) -> Iterator[float]:
        """Give what has arrived, in order."""
        while self.waiting and (self.waiting[0][1] is None or self.waiting[0][1].query()):
            yield self.waiting.popleft()[0].item()
