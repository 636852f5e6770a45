"""How much a training does in a second: steps, samples, floating-point operations. Runs in the target."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hookd_timing.flops import Waiting

if TYPE_CHECKING:
    from torch import nn

    from hookd import Context, Module

WINDOW_S = 1.0
PEAK_FLOPS = (
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Dense bfloat16 (before Ampere float16) matrix products per second, by what a device's name contains; the first that
fits. Source: NVIDIA's data sheets, which print twice as much where they mean sparse ones."""


class Throughput:
    """Counts on sampled steps, each for all the steps that it stands for, and says at the others what that makes.

    A *period* is one sampled step, from the end of the step before it; of several optimizers that take turns, the one
    that is followed is whichever hookd counts steps by.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch_dim = context.option("batch_dim", 0)
        self._peak_flops: float | None = context.option("peak_flops", None, kind=float)
        self._steps_per_s = context.gauge("steps_per_second", "Optimizer steps per second.")
        self._samples = context.counter("samples", "Samples trained on, estimated from sampled steps.")
        self._samples_per_s = context.gauge("samples_per_second", "Samples trained on per second.")
        self._flops = context.counter("flops", "Operations of layers with a formula, estimated from sampled steps.")
        self._flops_per_s = context.gauge("flops_per_second", "Operations of layers with a formula per second.")
        self._mfu = context.gauge("mfu_ratio", "flops_per_second over the best that the device can do.")
        self._waiting = Waiting()
        self._trained: dict[int, int] = {}  # trained parameters of each root
        self._period = 0  # the step that is, or was, sampled
        self._counted = [0, 0]  # samples and operations in it
        self._per_step: list[int] = [0, 0]  # the same in the last one that is over
        self._began: tuple[float, int] | None = None  # when the window began, and at which step
        self._last_step = 0

    # -- on a sampled step

    def see_root(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples of a call of a root."""
        self._end_period(self._context.step)
        root = module.torch()
        if root is None:
            return
        if module.id not in self._trained:
            self._trained[module.id] = sum(p.numel() for p in root.parameters() if p.requires_grad)
            if self._peak_flops is None:
                self._peak_flops = _peak_flops(root)
        is_largest = self._trained[module.id] == max(self._trained.values()) > 0
        if is_largest and root.training:
            self._count(0, batch_size(inputs, kwargs, self._batch_dim), self._samples)

    def see(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the operations of a call."""
        self._end_period(self._context.step)
        self._count(1, self._waiting.forward(module, inputs, kwargs), self._flops)

    def see_backward(self, module: Module) -> None:
        """Count the operations of its backward."""
        self._count(1, self._waiting.backward(module), self._flops)

    def _count(self, kind: int, number: int, counter: Any) -> None:
        if number:
            self._period = self._context.step
            self._counted[kind] += number
            counter.inc(number * self._context.interval)

    # -- at the end of every step

    def step_done(self) -> None:
        """End a step; of several optimizers in one step the first counts."""
        step = self._context.step
        if step == self._last_step:
            return
        self._last_step = step
        self._end_period(step)
        now = perf_counter()
        if self._began is None or step <= self._began[1]:  # the absolute number may become known, or a run begin anew
            self._began = (now, step)
        elif now - self._began[0] >= WINDOW_S:
            self._show((step - self._began[1]) / (now - self._began[0]))
            self._began = (now, step)

    def _end_period(self, step: int) -> None:
        if self._period and step > self._period:
            self._per_step, self._counted, self._period = self._counted, [0, 0], 0
            self._waiting.forget()

    def _show(self, steps_per_s: float) -> None:
        samples, flops = self._per_step
        self._steps_per_s.set(steps_per_s)
        if samples:
            self._samples_per_s.set(samples * steps_per_s)
        if flops:
            self._flops_per_s.set(flops * steps_per_s)
            if self._peak_flops:
                self._mfu.set(flops * steps_per_s / self._peak_flops)


def batch_size(inputs: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> int:
    """Tell the samples of a call by its first argument, or the first tensor in that; 0 where that cannot be told."""
    first = inputs[0] if inputs else next(iter(kwargs.values()), None)
    if isinstance(first, dict):
        first = next((value for value in first.values() if isinstance(value, torch.Tensor)), None)
    if not isinstance(first, torch.Tensor) or not 0 <= dim < first.dim():
        return 0
    return int(first.shape[dim])


def _peak_flops(root: nn.Module) -> float | None:
    parameter = next(root.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(parameter.device)
    return next((flops for part, flops in PEAK_FLOPS if part in name), None)
