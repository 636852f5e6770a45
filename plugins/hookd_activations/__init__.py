"""What the outputs of each module look like: mean, spread, range and zeros. Runs in the target.

    hookd_activations_mean{module}         of the first floating-point tensor in the module's output,
    hookd_activations_std{module}          over all its elements (population standard deviation),
    hookd_activations_min{module}          as of the last sampled step: one step in `every`
    hookd_activations_max{module}
    hookd_activations_zero_ratio{module}   share of elements that are exactly 0: of a ReLU's output, the dead part

NaN and infinities are left out of mean, std, min and max (hookd_nan reports them), so that attention masks do not
drown the rest; where nothing is left, the four are NaN. Sums are made in float32 about the mean of each
chunk, and across chunks in float64: right for a mean of 1000 with a spread of 1, and nothing as large as the output is
allocated.

Options: `modules=GLOB|GLOB` (names as in the label) and `depth=N` (deepest modules to look at, the root is 0).
"""

from __future__ import annotations

import math
from collections import deque
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from hookd import Context, Module, Plugin, PluginError, hookimpl, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Stats = tuple[float, float, float, float, float]
STATS = ("mean", "std", "min", "max", "zero_ratio")
HELP = "of the module's output at the last sampled step."
PLAIN = (Tensor, torch.nn.Parameter)
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CHUNK = 1 << 16
"""Elements reduced at a time: their differences from the mean stay in the processor's cache."""
SAFE = (1e-15, 1e15)
"""Magnitudes whose squares float32 can add up without losing the small or overflowing with the large."""


class Activations(Plugin):
    """Samples the outputs of modules, in one step of ten."""

    name = "activations"
    sampled = ("forward",)
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read `modules` and `depth`, and declare one gauge for each number."""
        self.globs = context.option("modules", "*").split("|")
        self.depth = context.option("depth", -1)
        if self.depth < -1:
            raise PluginError(f"activations: depth must be 0 or more, not {self.depth}")
        words = ("Mean", "Standard deviation", "Smallest finite element", "Largest finite element", "Share of zeros")
        self.gauges = [context.gauge(name, f"{word} {HELP}", ["module"]) for name, word in zip(STATS, words)]
        self.cells: dict[int, tuple[Callable[[float], None], ...]] = {}
        self.later = Later()

    @hookimpl
    def select(self, module: Module) -> bool:
        """Take the modules that the options name."""
        is_shallow = self.depth < 0 or module.depth <= self.depth
        return is_shallow and any(fnmatchcase(module.name, glob) for glob in self.globs)

    @hookimpl
    def forward(self, module: Module, output: Any) -> None:
        """Reduce the output to five numbers."""
        tensor = next((t for t in tensors(output) if is_real(t)), None)
        if tensor is None:
            return
        if on_host(tensor):
            self._store(module, stats(tensor))
        else:
            self.later.put(device_stats(tensor), module)

    @hookimpl
    def step_post(self) -> None:
        """Store what has arrived from a device since."""
        for module, values in self.later.take():
            self._store(module, values)

    def _store(self, module: Module, values: Iterable[float]) -> None:
        setters = self.cells.get(module.id)
        if setters is None:
            setters = self.cells[module.id] = tuple(gauge.labels(module.name).set for gauge in self.gauges)
        for store, value in zip(setters, values):
            store(value)


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


def is_real(tensor: Tensor) -> bool:
    """Whether it has floating-point elements that can be read here and now."""
    return (
        tensor.is_floating_point()
        and type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and not (getattr(tensor, "is_nested", False) or tensor.is_meta)
        and tensor.numel() > 0
    )


def stats(tensor: Tensor) -> Stats:
    """Give mean, std, min, max and the share of zeros of a tensor in the host's memory.

    Args:
        tensor: [...] floating, not empty; not modified.

    Returns:
        NaN for the first four where no element is finite.
    """
    flat = flatten(tensor)
    zeros = 1 - int(flat.count_nonzero()) / flat.numel()
    low, high = (end.item() for end in torch.aminmax(flat))
    if not (low > -math.inf and high < math.inf):  # false for NaN, too
        flat = flat[flat.isfinite()]
        if not flat.numel():
            return (math.nan, math.nan, math.nan, math.nan, zeros)
        low, high = (end.item() for end in torch.aminmax(flat))
    mean, variance = (low, 0.0) if low == high else moments(flat, max(-low, high))
    return (mean, math.sqrt(variance), low, high, zeros)


def flatten(tensor: Tensor) -> Tensor:
    """Give all elements in one dimension, in any order; a copy only where the memory has gaps, or of a float8."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    return flat if flat.dtype in REAL else flat.float()


def moments(flat: Tensor, peak: float) -> tuple[float, float]:
    """Give mean and population variance of finite elements of which `peak` is the largest magnitude.

    Each chunk is reduced about its own mean, and the chunks are combined pairwise in float64.
    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979, 2.1.
    """
    wide = torch.float32 if flat.dtype != torch.float64 and SAFE[0] < peak < SAFE[1] else torch.float64
    n, mean, squares = 0, 0.0, 0.0
    for chunk in torch.split(flat, CHUNK):
        values, m = chunk.to(wide), chunk.numel()
        center = values.mean()
        deviation = values - center
        delta = center.item() - mean
        squares += torch.dot(deviation, deviation).item() + delta * delta * n * m / (n + m)
        mean += delta * m / (n + m)
        n += m
    return mean, squares / n


def device_stats(tensor: Tensor) -> Tensor:
    """Give [5] float32 on the tensor's device: what `stats` gives, without waiting for the device."""
    wide = flatten(tensor).float()
    bad = ~wide.isfinite()
    n = wide.numel() - bad.sum()
    mean = wide.masked_fill(bad, 0.0).sum() / n
    variance = (wide - mean).masked_fill(bad, 0.0).square().sum() / n
    low = wide.masked_fill(bad, math.inf).amin().masked_fill(n == 0, math.nan)
    high = wide.masked_fill(bad, -math.inf).amax().masked_fill(n == 0, math.nan)
    zeros = 1 - wide.count_nonzero() / wide.numel()
    return torch.stack((mean, variance.sqrt(), low, high, zeros))


class Later:
    """Reads small tensors of a device without waiting for it: asked for now, taken when they have arrived."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Module, Tensor, Any]] = deque()

    def put(self, values: Tensor, module: Module) -> None:
        """Send `values` on their way."""
        if not values.is_cuda:
            self.waiting.append((module, values, None))
            return
        with torch.cuda.device(values.device):
            host = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.waiting.append((module, host, event))

    def take(self) -> Iterator[tuple[Module, list[float]]]:
        """Give what has arrived, in order."""
        while self.waiting and (self.waiting[0][2] is None or self.waiting[0][2].query()):
            module, values, _ = self.waiting.popleft()
            yield module, values.tolist()
