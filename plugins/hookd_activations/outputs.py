"""Compute what a summary of an output lacks: its saturation, its dead units, its distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookd import tensor_ref, tensors

LIMIT = 1 << 16
"""Elements used at most, evenly spread over the tensor."""
EDGES = (-100.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 100.0)
SATURATION: dict[str, tuple[float, float]] = {
    "Sigmoid": (0.5, 0.48), "Hardsigmoid": (0.5, 0.48), "Tanh": (0.0, 0.98), "Hardtanh": (0.0, 0.98),
    "Softsign": (0.0, 0.98), "GELU": (0.0, -1e-3), "SiLU": (0.0, -1e-3), "Mish": (0.0, -1e-3),
}  # fmt: skip
"""Centre and distance by the type of module. An element at least that far from the centre is saturated, because the
derivative is almost 0 there. With a negative distance, an element at most that far from it is saturated: the flat
negative half of GELU."""


ENOUGH = 256
"""Samples in which a unit has to stay at 0 before it is dead, if other units of its layer fire."""
NEAR = 8
"""Operations of one tensor each that may lie between a module's output and the model's, for it to be the model's."""


class Units:
    """Tracks, over several samples, which units of a rectifier have ever output anything but 0.

    A unit is a channel of an image, or else an index of the last dimension.
    """

    def __init__(self) -> None:
        self._fired: Tensor | None = None
        self._samples = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Add an output; return [] the share of units that have not fired so far.

        Before ENOUGH samples it is 0, or 1 if no unit at all has fired.
        """
        flat = tensor.detach().reshape(1, -1) if tensor.dim() < 2 else tensor.detach()
        unit = 1 if flat.dim() > 3 else flat.dim() - 1
        fired = flat.count_nonzero(dim=[d for d in range(flat.dim()) if d != unit])
        if self._fired is None or self._fired.shape != fired.shape:
            self._fired, self._samples = torch.zeros_like(fired), 0
        self._fired = self._fired + fired
        self._samples += flat.numel() // fired.numel()
        never = self._fired.eq(0).float().mean()
        return never if self._samples >= ENOUGH else never.floor()


class OutputMatcher:
    """Recognizes a module's output in the output of the model, by its memory or its graph.

    The tensor may be gone by the time the model returns; its graph node is kept until then.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor_ref(tensor)
        base = base_of(tensor)
        self._base = None if base is None else tensor_ref(base)
        self._node = tensor.grad_fn

    def is_given_back(self, output: Any) -> bool:
        """Whether `output` has the tensor, a view of it, or a tensor that a few operations derive from it alone."""
        return any(self._is_behind(tensor) for tensor in tensors(output))

    def _is_behind(self, given: Tensor) -> bool:
        known = [ref() for ref in (self._tensor, self._base) if ref is not None]
        if any(tensor is not None and (tensor is given or tensor is base_of(given)) for tensor in known):
            return True
        node = given.grad_fn if self._node is not None else None
        for _ in range(NEAR):
            if node is None or node is self._node:
                break
            before = [edge for edge, _ in node.next_functions if edge is not None]
            node = before[0] if len(before) == 1 else None
        return node is not None and node is self._node


def base_of(view: Tensor) -> Tensor | None:
    """Return the base tensor of a view, None if the tensor is not a view."""
    return view._base  # noqa: SLF001 - torch has no public name for it


def spread(tensor: Tensor) -> Tensor:
    """Return [n] at most LIMIT elements, evenly spread; a view if the memory has no gaps."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // LIMIT)]


def saturation_ratio(tensor: Tensor, kind: str) -> Tensor:
    """Return [] the share of saturated elements in the output of a module of type `kind`, a key of SATURATION."""
    centre, distance = SATURATION[kind]
    away = (spread(tensor).float() - centre).abs()
    return (away >= distance if distance > 0 else away <= -distance).float().mean()


def below_ratios(tensor: Tensor) -> Tensor:
    """Return [len(EDGES)] the share of elements that are at most each edge; NaN is above all edges."""
    values = spread(tensor).float()
    # One by one: a tensor of all edges would need a copy to the device, and a wait for it.
    return torch.stack([(values <= edge).float().mean() for edge in EDGES])
