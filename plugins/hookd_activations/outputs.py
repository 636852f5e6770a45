"""What a summary does not tell of an output: what is saturated, which units are dead, its distribution. In the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookd import tensor_ref, tensors

LIMIT = 1 << 16
"""At most so many elements are looked at, evenly spread over the tensor."""
EDGES = (-100.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 100.0)
SATURATION: dict[str, tuple[float, float]] = {
    "Sigmoid": (0.5, 0.48), "Hardsigmoid": (0.5, 0.48), "Tanh": (0.0, 0.98), "Hardtanh": (0.0, 0.98),
    "Softsign": (0.0, 0.98), "GELU": (0.0, -1e-3), "SiLU": (0.0, -1e-3), "Mish": (0.0, -1e-3),
}  # fmt: skip
"""Centre and distance by the type of module: an element as far from the centre as that is saturated, for there the
derivative is almost 0; where the distance is negative, one as near to it. Of a GELU that is its flat negative half."""


ENOUGH = 256
"""Samples in which a unit has not fired before it is called dead, where others in its layer fire."""
NEAR = 8
"""An output that so many operations of one tensor each lie between and the model's is the model's own."""


class Units:
    """Which units of a rectifier have ever put out anything but 0, over several looks.

    A unit is a channel of images, and else what the last dimension counts.
    """

    def __init__(self) -> None:
        self._fired: Tensor | None = None
        self._samples = 0

    def look(self, tensor: Tensor) -> Tensor:
        """Give [] the share of units that have not fired so far; 0 while too few samples have been seen to tell."""
        flat = tensor.detach().reshape(1, -1) if tensor.dim() < 2 else tensor.detach()
        unit = 1 if flat.dim() > 3 else flat.dim() - 1
        fired = flat.count_nonzero(dim=[d for d in range(flat.dim()) if d != unit])
        if self._fired is None or self._fired.shape != fired.shape:
            self._fired, self._samples = torch.zeros_like(fired), 0
        self._fired = self._fired + fired
        self._samples += flat.numel() // fired.numel()
        never = self._fired.eq(0).float().mean()
        return never if self._samples >= ENOUGH else never.floor()


class Place:
    """Where an output is found again: in the memory of what the model gives back, or in its graph.

    Between a module's return and that of the model the tensor may be gone; its node is kept for so long.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor_ref(tensor)
        base = base_of(tensor)
        self._base = None if base is None else tensor_ref(base)
        self._node = tensor.grad_fn

    def is_given_back(self, output: Any) -> bool:
        """Whether a model gives back the tensor itself, a view of it, or what a few operations make of it alone."""
        return any(self._is_behind(one) for one in tensors(output))

    def _is_behind(self, given: Tensor) -> bool:
        known = [ref() for ref in (self._tensor, self._base) if ref is not None]
        if any(one is not None and (one is given or one is base_of(given)) for one in known):
            return True
        node = given.grad_fn if self._node is not None else None
        for _ in range(NEAR):
            if node is None or node is self._node:
                break
            before = [edge for edge, _ in node.next_functions if edge is not None]
            node = before[0] if len(before) == 1 else None
        return node is not None and node is self._node


def base_of(view: Tensor) -> Tensor | None:
    """Give the tensor whose memory a view shows, None for one that is no view."""
    return view._base  # noqa: SLF001 - torch has no public name for it


def spread(tensor: Tensor) -> Tensor:
    """Give [n] at most LIMIT elements, evenly spread; a view where the memory has no gaps."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // LIMIT)]


def saturation_ratio(tensor: Tensor, kind: str) -> Tensor:
    """Give [] the share of saturated elements of the output of a module of type `kind`, which SATURATION must have."""
    centre, distance = SATURATION[kind]
    away = (spread(tensor).float() - centre).abs()
    return (away >= distance if distance > 0 else away <= -distance).float().mean()


def below_ratios(tensor: Tensor) -> Tensor:
    """Give [len(EDGES)] for each edge the share of elements that are at most that; NaN is above all."""
    values = spread(tensor).float()
    # One by one: a tensor of the edges would have to be copied to the device, and the copy be waited for.
    return torch.stack([(values <= edge).float().mean() for edge in EDGES])
