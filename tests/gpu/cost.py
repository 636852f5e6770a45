"""Measure the cost of hookd for a training on a GPU: time of a step, time of the launches, synchronizations, memory, kernels."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from hookd.api.inprocess import DEFAULT
from hookd.testing.pairs import alternate
from tests.bench.attached import Attached
from tests.gpu.place import Table
from tests.gpu.trainings import Size, Transformer, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.place import Place

BAR, MEMORY_BAR = 1.005, 64 << 20
"""The ratio of step times, and the bytes kept on the device, that the default observers may reach."""
SETTLE, PAIRS, STEPS = 400, 12, 20
"""Steps until the governor has found its intervals, pairs of blocks, and steps in a block."""
DRY = (10, 2, 3)


class Work:
    """A training in this process.

    Args:
        name: of its model.
        make: returns the model and the function that computes the loss.
        device: on which.
    """

    def __init__(
        self, name: str, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]], device: str
    ) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, device
        model, self._loss = make()
        self.model = model.to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        """Launch one step, without waiting for it."""
        self._optimizer.zero_grad()
        self._loss(self.model).backward()
        self._optimizer.step()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wall(self, steps: int) -> float:
        """Return the seconds of some steps."""
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return time.perf_counter() - began

    def launch(self, steps: int) -> float:
        """Return the processor seconds in which some steps are launched, with an idle device before each."""
        spent = 0.0
        for _ in range(steps):
            self.wait()
            began = time.thread_time()
            self.step()
            spent += time.thread_time() - began
        return spent


def works(place: Place) -> list[Work]:
    """Return the trainings: one that the device bounds, one that is bound by launches, one of convolutions."""
    size, device = Size(tiny=place.is_dry), place.device
    ids = torch.randint(size.words, (size.batch, size.length + 1), device=device)
    images = torch.randn(2 if place.is_dry else 64, 3, *(2 * [16 if place.is_dry else 128]), device=device)
    rows = torch.randn(64, 256, device=device)

    def transformer() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model = Transformer(size.width, size.layers, size.words).to(torch.bfloat16)
        return model, lambda model: loss_of(model, ids)

    def small() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        return Transformer(size.small_width, size.small_layers, size.words), lambda model: loss_of(model, ids)

    def convnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256), (256, 256)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
        ), lambda model: model(images).square().mean()

    def mlp() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        layers = [one for _ in range(12) for one in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(*layers), lambda model: model(rows).square().mean()

    return [Work(make.__name__, make, device) for make in (transformer, small, convnet, mlp)]


def part(place: Place) -> Table:
    """Measure the default observers on each training."""
    settle, pairs, steps = DRY if place.is_dry else (SETTLE, PAIRS, STEPS)
    table = Table(
        "What it costs",
        f"Default observers, settled for {settle} steps; {pairs} pairs of blocks of {steps} steps that alternate in one process. Bars: {BAR} of a"
        f" step's time, no synchronization, {MEMORY_BAR >> 20} MiB kept.",
        (
            "training",
            "a step",
            "ratio",
            "processor time of its launches",
            "synchronizations",
            "kept on the device",
            "kernels of a step",
        ),
    )
    for work in works(place):
        with Attached(DEFAULT) as attached:
            attached.settle(work.step, settle)
            attached.leave()
            wall = alternate(lambda work=work: work.wall(steps), attached.on, pairs, work.step)
            launch = alternate(lambda work=work: work.launch(steps), attached.on, pairs, work.step)
            waits = _synchronizations(work, attached, steps) if work.device == "cuda" else "-"
            kernels = _kernels(work, attached) if work.device == "cuda" else "-"
            kept = _kept(work, attached, steps) if work.device == "cuda" else 0
        ratio, launching = wall.mean.value, launch.mean.value
        step_s = statistics.median(wall.plain) / steps
        table.rows.append([
            work.name, f"{step_s * 1e3:.1f} ms", f"{ratio:.3f}", f"{launching:.2f}", str(waits), f"{kept / (1 << 20):.1f} MiB", str(kernels),
        ])  # fmt: skip
        table.figures[work.name] = {
            "step_s": step_s,
            "ratio": ratio,
            "launch_ratio": launching,
            "kept_bytes": kept,
            "waits": waits,
        }
        if not place.is_dry:
            table.failures += _above(work.name, ratio, waits, kept)
        del work
        gc.collect()
    return table


def _above(name: str, ratio: float, waits: object, kept: int) -> list[str]:
    found = [f"{name}: a step takes {ratio:.3f} times as long, above {BAR}"] if ratio > BAR else []
    found += [f"{name}: hookd waits for the device: {waits}"] if waits != 0 else []
    return found + ([f"{name}: {kept >> 20} MiB are kept on the device"] if kept > MEMORY_BAR else [])


def _synchronizations(work: Work, attached: Attached, steps: int) -> int | str:
    """Return 0 if nothing waits for the device in observed steps; else the error that CUDA raised in hookd."""
    work.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        with attached.on():
            for _ in range(3 * steps):
                work.step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0


def _kept(work: Work, attached: Attached, steps: int) -> int:
    """Return the bytes that are allocated on the device after observed steps, and were not before."""
    work.wait()
    before = torch.cuda.memory_allocated()
    with attached.on():
        for _ in range(steps):
            work.step()
        work.wait()
        return max(0, torch.cuda.memory_allocated() - before)


def _kernels(work: Work, attached: Attached) -> str:
    """Return the mean number of kernels and copies in a step, without hookd and with it."""
    with attached.on():
        watched = _counted(work)
    return f"{_counted(work):.0f} and {watched:.0f}"


def _counted(work: Work, steps: int = 10) -> float:
    from torch.profiler import ProfilerActivity, profile

    work.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            work.step()
        work.wait()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events()) / steps
