"""The states of random number generators; none of them is drawn from."""

from __future__ import annotations

import contextlib
import sys
from array import array
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def random_states() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of the default generators of torch, of its CUDA devices, Python and numpy, each with its state in host memory.

    CUDA's are left out if the program has not initialized it, Python's and numpy's if it has not imported them, and numpy's also if it
    is not a Mersenne Twister.
    """
    yield "torch", torch.default_generator.get_state()
    yield from _cuda()
    python: Any = sys.modules.get("random")
    if python is not None:
        yield "python", _words(python.getstate()[1])
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        if "key" in state:
            yield "numpy", _words([*state["key"].tolist(), state["pos"]])


def _cuda() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the states of CUDA's generators: their seeds and offsets, which are in host memory, so that nothing waits."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, generator in enumerate(torch.cuda.default_generators):
            with contextlib.suppress(RuntimeError):  # while a graph is captured
                yield f"cuda:{device}", generator.get_state()


def _words(numbers: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
