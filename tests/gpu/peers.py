"""Measure the cost of other tools on the same training, beside hookd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hookd.api.inprocess import DEFAULT
from hookd.testing.pairs import alternate
from tests.bench.attached import Attached
from tests.gpu.cost import DRY, PAIRS, SETTLE, STEPS, works
from tests.gpu.place import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.gpu.cost import Work
    from tests.gpu.place import Place

ON = "small"
"""The training."""


def part(place: Place) -> Table:
    """Measure each tool on one training."""
    settle, pairs, steps = DRY if place.is_dry else (SETTLE, PAIRS, STEPS)
    table = Table(
        "Beside other tools",
        f"The transformer `{ON}` of the table of costs, in the same way. Of each tool, the time of a step as a ratio to that without it.",
        ("tool", "what it is for", "a step"),
    )
    work = next(one for one in works(place) if one.name == ON)
    for name, what, opened in _tools(settle):
        with opened(work) as on:
            found = alternate(lambda: work.wall(steps), on, pairs, work.step)
        table.rows.append([name, what, f"{found.mean.value:.2f}"])
        table.figures[name] = found.mean.value
    return table


Opened = Any
"""A function that opens a tool for a training, and yields a function that returns the context in which it looks."""


def _tools(settle: int) -> list[tuple[str, str, Opened]]:
    return [
        ("hookd, default observers", "NaN, timing, activations, learning", _hookd(DEFAULT, settle)),
        ("hookd, `nan:every=1`", "the module of the first NaN", _hookd((("nan", {"every": 1}),), settle)),
        ("`torch.autograd.detect_anomaly()`", "the function of a NaN in the backward", _anomaly),
        ("forward hooks with `isfinite().all().item()`", "the module of a NaN in the forward", _checked),
        ("`torch.profiler`, kernels", "a trace of all kernels", _profiled),
    ]


def _hookd(plugins: Any, settle: int) -> Opened:
    @contextlib.contextmanager
    def opened(work: Work) -> Iterator[Callable[[], AbstractContextManager[object]]]:
        with Attached(plugins) as attached:
            attached.settle(work.step, settle)
            attached.leave()
            yield attached.on

    return opened


@contextlib.contextmanager
def _anomaly(_: Work) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    yield torch.autograd.detect_anomaly


@contextlib.contextmanager
def _checked(work: Work) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    @contextlib.contextmanager
    def on() -> Iterator[None]:
        def check(_module: object, _inputs: object, output: Any) -> None:
            if not output.isfinite().all().item():
                raise FloatingPointError

        hooks = [module.register_forward_hook(check) for module in work.model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    yield on


@contextlib.contextmanager
def _profiled(work: Work) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if work.device == "cuda" else ProfilerActivity.CPU
    yield lambda: profile(activities=[activity])
