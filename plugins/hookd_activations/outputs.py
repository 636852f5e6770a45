"""What a summary does not tell of an output: how much of it is saturated, and how it is distributed. In the target."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 1 << 16
"""At most so many elements are looked at, evenly spread over the tensor."""
EDGES = (-100.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 100.0)
SATURATION: dict[str, tuple[float, float]] = {
    "Sigmoid": (0.5, 0.48), "Hardsigmoid": (0.5, 0.48), "Tanh": (0.0, 0.98), "Hardtanh": (0.0, 0.98),
    "Softsign": (0.0, 0.98), "GELU": (0.0, -1e-3), "SiLU": (0.0, -1e-3), "Mish": (0.0, -1e-3),
}  # fmt: skip
"""Centre and distance by the type of module: an element as far from the centre as that is saturated, for there the
derivative is almost 0; where the distance is negative, one as near to it. Of a GELU that is its flat negative half."""


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
