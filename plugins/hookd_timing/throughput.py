"""Count what a training gets through: samples and floating-point operations."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hookd import PluginError, of_tensor, parameters_in, tensors
from hookd_timing.flops import Call, Waiting
from hookd_timing.peak import peak_flops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookd import Context, Module

_IDS = (torch.int64, torch.int32)
_NOTHING = (0, 0)


class Throughput:
    """Counts samples in all steps, and operations in sampled ones. Rates are Prometheus' work: a gauge would outlive a hang.

    Operations of the steps between are assumed to be the same. A *period* is one sampled step, from the end of the step before
    it; several steps that are reported together are one period.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_odd = False  # the batch dimension does not exist, and that was reported
        self._batch_dim = _batch_dim(context)
        self._peak_flops = _given_peak(context)
        self._samples = context.counter("samples", "Samples trained on.").labels()
        self._tokens = context.counter("tokens", "Token ids trained on, padding included.")
        self._flops = context.counter(
            "flops", "Operations of layers with a formula, estimated from sampled steps."
        ).labels()
        self._peak = context.gauge("peak_flops_per_second", "Operations per second of which the device is capable.")
        self._device_info = context.gauge(
            "device_info", "1 for each GPU that parameters of the training are on.", ("device", "gpu_uuid", "gpu")
        )
        self._devices: set[torch.device] = set()
        self._show_peak()
        self._call = Call()  # the outermost call
        self._waiting = Waiting()
        self._roots: dict[int, tuple[Module, int]] = {}  # with the number of its trained parameters
        self._largest: list[int] = []  # of these, those with most trained parameters
        self._by_root: dict[int, tuple[int, int]] = {}  # samples and tokens of the step in progress
        self._needs_check = "batch_dim" in context.options
        self._period = 0  # the sampled step; 0: none
        self._every = _count_every(context)
        self._counted = (0, 0)  # the last counted step, and the first that may be the next
        self._is_over, self._spanned = False, 1  # the period has ended; the number of its steps
        self._is_absolute = False  # its step has the absolute number
        self._so_far = 0  # operations in the period
        self._per_step = 0  # the same in a step of the last period that is over

    def is_due(self) -> bool:
        """Whether operations are counted in the next step, if it is sampled."""
        counted, due = self._counted
        return not counted <= self._context.step < due - 1  # the numbering of steps may start again

    def see_root(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        """Count the samples of a root's call; the size of a lazy root is unknown before its second call."""
        root = module.torch()
        if root is not None and module.id not in self._roots:
            own = [parameter for _, parameter in parameters_in(root)]
            if not any(map(is_lazy, own)):
                self._roots[module.id] = module, sum(Tensor.numel(p) for p in own if of_tensor(p, "requires_grad"))
                self._see_devices(own)
                self._find_largest()
        samples, tokens = self._by_root.get(module.id, (0, 0))
        samples += batch_size(inputs, kwargs, self._batch_dim)
        self._by_root[module.id] = samples, tokens + token_count(inputs, kwargs)
        if self._needs_check and not self._is_odd:
            self._check_dim(module, inputs, kwargs)

    def _see_devices(self, parameters: Sequence[Tensor]) -> None:
        """Publish the GPUs of parameters, and the peak of the first one."""
        for place in dict.fromkeys(of_tensor(parameter, "device") for parameter in parameters):
            if place.type != "cuda" or place in self._devices:
                continue
            self._devices.add(place)
            gpu = torch.cuda.get_device_properties(place)  # torch asks the driver once, at the initialization of CUDA
            uuid = str(getattr(gpu, "uuid", ""))  # torch 2.4 and newer; NVML's names begin with GPU-
            self._device_info.labels(
                str(place), uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}", gpu.name
            ).set(1.0)
            self._peak_flops = self._peak_flops or peak_flops(gpu.name, gpu.multi_processor_count)
        self._show_peak()

    def _check_dim(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        first = first_tensor(inputs, kwargs)
        self._is_odd = first is not None and self._batch_dim >= first.dim()
        if first is not None and self._is_odd:
            text = f"timing: batch_dim={self._batch_dim}, but the input of {module.name} has {first.dim()} dimensions"
            self._context.incident(
                "option", f"{text}: no samples are counted (the first dimension is 0)", module=module.name
            )

    # -- on a sampled step

    def begin_call(self) -> None:
        """Begin an outermost call."""
        self._call = Call()

    def see(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        """Count the operations of a call, and of its backward."""
        step, before = self._context.step, self._counted
        self._end_period(step)
        self._period, self._is_absolute = step, self._context.is_step_absolute
        if step != before[0]:
            # The distance alternates: otherwise a training that alternates between two kinds of steps would only show one.
            is_short = before[1] - before[0] == self._every
            self._counted = step, step + max(self._every - is_short, 1)
        self._waiting.forward(module, inputs, kwargs, self._call)

    def see_backward(self, module: Module) -> None:
        """Count the operations that are now known to belong to the training."""
        flops = self._waiting.backward(module)
        if flops:
            self._so_far += flops
            self._flops.inc(flops)

    # -- at the end of every step

    def step_done(self) -> None:
        """End a step."""
        step = self._context.step
        self._end_samples()
        if self._period and not self._is_over:
            is_alike = self._is_absolute == self._context.is_step_absolute  # the absolute number may have become known
            self._is_over, self._spanned = True, max(1, step - self._period + 1) if is_alike else 1
        else:  # not sampled
            self._end_period(step)
            if self._per_step:
                self._flops.inc(self._per_step)

    def _end_samples(self) -> None:
        """Count the samples and tokens of the largest root in the step that is over."""
        by_root = self._by_root
        if not by_root:
            return
        if not any(by_root.get(number, _NOTHING)[0] for number in self._largest):  # the largest may be gone
            self._find_largest()
        for number in self._largest:
            samples, tokens = by_root.get(number, _NOTHING)
            if samples:
                self._samples.inc(samples)
            if tokens:
                self._tokens.inc(tokens)
        by_root.clear()

    def _find_largest(self) -> None:
        self._roots = {number: one for number, one in self._roots.items() if one[0].torch() is not None}
        most = max((trained for _, trained in self._roots.values()), default=0)
        self._largest = [number for number, (_, trained) in self._roots.items() if trained == most > 0]

    def _end_period(self, step: int) -> None:
        if self._period and step > self._period:
            if self._so_far:
                self._per_step = self._so_far // self._spanned
            else:  # all of it was inference, which represents nothing
                self._counted = (0, 0)
            self._so_far, self._period, self._is_over, self._spanned = 0, 0, False, 1
            self._waiting.step_done()

    def _show_peak(self) -> None:
        if self._peak_flops:
            self._peak.set(self._peak_flops)


def batch_size(inputs: tuple[Any, ...], kwargs: Mapping[str, object], dim: int) -> int:
    """Return the samples of a call, by its first argument or the first tensor in it; 0 if they cannot be counted."""
    if inputs and type(inputs[0]) is Tensor and not dim and not inputs[0].is_nested and inputs[0].dim():
        return len(inputs[0])  # by far the most frequent case: no subclass's code runs
    first = first_tensor(inputs, kwargs)
    if first is None:
        return 0
    if of_tensor(first, "is_nested"):  # other dimensions have several sizes; a strided one has no shape
        return 0 if dim else int(Tensor.size(first, 0))
    shape = of_tensor(first, "shape")
    return int(shape[dim]) if 0 <= dim < len(shape) else 0


def token_count(inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> int:
    """Return the elements of a call's first argument, or of the first tensor in it, if these are integers in [batch, length]; else 0."""
    first = first_tensor(inputs, kwargs)
    if first is None or of_tensor(first, "dtype") not in _IDS or of_tensor(first, "is_nested"):
        return 0
    return int(Tensor.numel(first)) if len(of_tensor(first, "shape")) == 2 else 0


def first_tensor(inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return the first argument, or the first tensor in it if it is a dict; None if that is not a tensor."""
    first: Any = inputs[0] if inputs else next(iter(kwargs.values()), None)
    if issubclass(type(first), dict):
        first = next(iter(tensors(first)), None)
    return first if issubclass(type(first), Tensor) else None


def _batch_dim(context: Context) -> int:
    dim: int = context.option("batch_dim", 0)
    if dim < -1:
        raise PluginError(f"timing: batch_dim must be the number of a dimension, or -1 for none, not {dim}")
    return dim


def _count_every(context: Context) -> int:
    every: int = context.option("count_every", 10, least=1)
    return every


def _given_peak(context: Context) -> float | None:
    peak: float | None = context.option("peak_flops", None, kind=float)
    if peak is not None and not 0 < peak < inf:
        raise PluginError(f"timing: peak_flops must be operations per second, more than 0, not {peak:g}")
    return peak
