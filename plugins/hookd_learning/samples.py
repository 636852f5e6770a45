"""The parts of optimizers and tensors that are read in a sampled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a group; None if it has none, or if it is on a device."""
    rate: Any = group.get("lr")
    is_known = type(rate) in (int, float) or (type(rate) is Tensor and rate.is_cpu)
    return float(rate) if is_known else None


def beginning(tensor: Tensor, most: int) -> Tensor:
    """Return the first elements of a tensor, as a copy."""
    return tensor.detach().reshape(-1)[:most].clone()


def spread(found: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most so many of some parameters, evenly spread from the first to the last."""
    if len(found) <= most:
        return found
    return [found[at * (len(found) - 1) // (most - 1)] for at in range(most)]
