"""The parts of optimizers and tensors that are read in a sampled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def beginning(tensor: Tensor, most: int) -> Tensor:
    """Return the first elements of a tensor, as a copy."""
    return tensor.detach().reshape(-1)[:most].clone()


def spread(found: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most so many of some parameters, evenly spread from the first to the last."""
    if len(found) <= most:
        return found
    return [found[at * (len(found) - 1) // (most - 1)] for at in range(most)]
