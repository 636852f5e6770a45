"""Follow the loss scale of a GradScaler, and count the steps that it skipped."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd import peek

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookd import Context

GradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # torch < 2.3 has only the latter
CALLS = {GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__}  # noqa: SLF001 - there is no public way
FRAMES = 16
"""Frames up the stack in which to look for a GradScaler: wrappers of hookd and of the optimizer lie between."""
MOST = 64
"""Skips in a row that are plausible; for more, the training code has set the scale itself."""


class Seen(NamedTuple):
    """A scaler at the call of an optimizer's `step`; `found_inf` is above 0 if a fused optimizer will skip the step."""

    scale: float
    tracker: float
    found_inf: float


def scaler_of(optimizer: Optimizer) -> Any:
    """Return the GradScaler that is calling this optimizer's step, or None."""
    # From outside, only the stack shows it.
    frame: Any = sys._getframe(1)  # noqa: SLF001
    for _ in range(FRAMES):
        if frame is None:
            return None
        if frame.f_code in CALLS:
            scaler = frame.f_locals.get("self")
            return scaler if frame.f_locals.get("optimizer") is optimizer else None
        frame = frame.f_back
    return None


class Scale:
    """Follows the scale of a GradScaler from step to step.

    Source of its rules: torch/amp/grad_scaler.py `GradScaler.update`, 2.13: `backoff_factor` after a step that
    overflowed, `growth_factor` after `growth_interval` steps in a row that did not.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gauge = context.gauge("loss_scale", "Loss scale at the last step that was not skipped.")
        self._counter = context.counter("skipped_steps", "Steps that the GradScaler skipped.")
        self._before: Seen | None = None

    def request(self, scaler: Any, optimizer: Optimizer) -> None:
        """Request the scale of the step that begins; it arrives later."""
        scale, tracker = peek(scaler, "_scale"), peek(scaler, "_growth_tracker")
        if type(scale) is not torch.Tensor or type(tracker) is not torch.Tensor:
            return
        rules = (peek(scaler, "_growth_interval"), peek(scaler, "_growth_factor"), peek(scaler, "_backoff_factor"))
        if self._before is None and self._context.is_step_absolute and self._context.step == 1:
            self._before = Seen(float(peek(scaler, "_init_scale")), -1.0, 0.0)  # loaded from the beginning
        # The GradScaler passes it to a fused optimizer, which then skips the step by itself.
        found_inf = peek(optimizer, "found_inf")
        numbers = (scale, tracker, found_inf if type(found_inf) is torch.Tensor else torch.zeros_like(scale))
        if not all(map(self._context.is_readable, numbers)):
            return
        now = torch.stack([number.detach().reshape(()).to(scale.device, torch.float32) for number in numbers])
        self._context.later([now], lambda found: self._arrived(Seen(*found), rules))

    def _arrived(self, now: Seen, rules: tuple[int, float, float]) -> None:
        self._gauge.set(now.scale)
        self._counter.inc(0 if self._before is None else skipped(self._before, now, rules))
        self._before = now


def skipped(before: Seen, now: Seen, rules: tuple[int, float, float]) -> int:
    """Return how many steps were skipped from one call of `step` to the next, the first call included.

    Args:
        before: the scaler at the first call.
        now: the scaler at the second call.
        rules: growth interval, growth factor, backoff factor.
    """
    interval, growth, backoff = rules
    has_grown = before.tracker + 1 == interval and not before.found_inf
    expected = before.scale * (growth if has_grown else 1.0)
    if not (0.0 < backoff < 1.0 and expected > 0.0 and now.scale > 0.0):
        return 0
    times = math.log(now.scale / expected) / math.log(backoff)
    return round(times) if 0.5 < times <= MOST else 0
