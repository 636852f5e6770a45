"""The flight recorder: the last module calls before the first NaN, and what the last steps looked like.

It keeps no tensor and computes nothing until it is asked: it remembers outputs weakly, and of those that are alive at
the moment of the incident (autograd keeps most of a forward's) their numbers are taken then. Runs in the target.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from hookd import PluginError
from hookd_nan.scan import on_host

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from hookd import Context

STEPS, LARGEST = 8, 500


class Recorder:
    """The last calls and the last steps.

    Attributes:
        calls: `(module's name, weak reference to its output, the output's version)`, or on a device
            `(name, smallest, largest element)`; the newest last.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        calls = context.option("recorder", 20)
        if not 0 <= calls <= LARGEST:
            raise PluginError(f"nan: recorder must be from 0 to {LARGEST} calls, not {calls}")
        self.calls: deque[tuple[str, Any, Any]] = deque(maxlen=calls)
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._loss: float | None = None

    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Note the loss, if it is a number of the host's."""
        first = tensors[0] if tensors else None
        self._loss = first.item() if first is not None and on_host(first) and first.numel() == 1 else None

    def step(self, optimizer: Optimizer, largest: float | None) -> None:
        """Note a step: its loss, the largest magnitude in its gradients, its learning rate."""
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        self._steps.append(
            {
                "step": self._context.step,
                "loss": self._loss,
                "largest_gradient": largest,
                "lr": rate if isinstance(rate, (int, float)) else None,
            }
        )
        self._loss = None

    def contents(self) -> dict[str, Any]:
        """Give everything, for an incident."""
        steps = [{k: number(v) for k, v in one.items() if v is not None} for one in self._steps]
        return {"calls_before": [self._call(*one) for one in self.calls], "steps_before": steps}

    def _call(self, name: str, what: Any, more: Any) -> dict[str, Any]:
        if isinstance(what, float):
            return {"module": name, "min": number(what), "max": number(more)}
        tensor: Tensor | None = what()
        summary = None if tensor is None else self._context.summary(tensor)
        if tensor is None or summary is None:
            return {"module": name}
        call = {"module": name, "min": number(summary.min), "max": number(summary.max), "norm": number(summary.norm)}
        return {**call, "is_changed": True} if tensor._version != more else call  # noqa: SLF001


def number(value: float) -> float | str:
    """Give a number that JSON knows, rounded to 6 digits, or its name."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(float(value))
