"""The states of random number generators; none of them is drawn from."""

from __future__ import annotations

import contextlib
import sys
from array import array
from typing import TYPE_CHECKING, Any

import torch

from hookd import accelerators

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def random_states() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of the default generators of torch, of its devices, Python and numpy, each with its state in host memory.

    Those of devices are left out if the program has not initialized them, Python's and numpy's if it has not imported them, and numpy's also if it
    is not a Mersenne Twister.
    """
    yield "torch", torch.default_generator.get_state()
    yield from _of_devices()
    python: Any = sys.modules.get("random")
    if python is not None:
        yield "python", _words(python.getstate()[1])
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"]
        if "key" in state:
            yield "numpy", _words(state["key"].astype("q").tobytes(), state["pos"])


def _of_devices() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the states of the devices' generators: their seeds and offsets, which are in host memory, so that nothing waits."""
    for accelerator in accelerators():
        for device, generator in enumerate(accelerator.generators() if accelerator.is_in_use() else ()):
            with contextlib.suppress(RuntimeError):  # while a graph is captured
                yield f"{accelerator.kind}:{device}", generator.get_state()


def _words(numbers: Sequence[int] | bytes, *more: int) -> torch.Tensor:
    words = array("q", numbers)  # of bytes, as they are in memory
    words.extend(more)
    return torch.frombuffer(words, dtype=torch.int64)
