"""Digests of the states of random number generators; none of them is drawn from."""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd import Context


def random_states(context: Context) -> Iterator[tuple[str, int]]:
    """Yield the names of the default generators of torch, Python and numpy, each with the digest of its state.

    Python's and numpy's are left out if the program has not imported them, and numpy's if it is not a Mersenne Twister.
    """
    yield from _digest(context, "torch", torch.default_generator.get_state())
    python: Any = sys.modules.get("random")
    if python is not None:
        yield from _digest(context, "python", _words(python.getstate()[1]))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        if "key" in state:
            yield from _digest(context, "numpy", _words([*state["key"].tolist(), state["pos"]]))


def _digest(context: Context, name: str, state: torch.Tensor) -> Iterator[tuple[str, int]]:
    digest = context.digest(state)
    if digest is not None:
        yield name, digest.bits


def _words(numbers: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
