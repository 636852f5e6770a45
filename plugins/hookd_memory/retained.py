"""Detect whether the training code retains the outputs of a module."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from hookd import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Callable


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements; for an expanded tensor, more than it occupies."""
    return Tensor.numel(tensor) * Tensor.element_size(tensor)


class Retained:
    """Weak references to an output of each of the last sampled steps: if all are alive, the training retains them.

    Only tensors with a graph are watched: a module may return a buffer of its own, which has none.

    Attributes:
        nbytes: size of the last output.
        is_reported: `watch` has returned True.
    """

    def __init__(self, most: int) -> None:
        self._refs: deque[tuple[int, Callable[[], Tensor | None]]] = deque(maxlen=most)
        self.nbytes = 0
        self.is_reported = False

    @property
    def since(self) -> int:
        """The step of the oldest watched output."""
        return self._refs[0][0]

    @property
    def last(self) -> Tensor | None:
        """The newest output, as long as it is alive; never keep it."""
        return self._refs[-1][1]()

    def watch(self, tensor: Tensor, step: int) -> bool:
        """Watch the first output of a step; return True once, when all watched outputs are alive."""
        refs = self._refs
        if self.is_reported or (refs and (refs[-1][0] == step or refs[-1][1]() is tensor)):
            return False
        refs.append((step, tensor_ref(tensor)))
        if len(refs) < (refs.maxlen or 0) or any(ref() is None for _, ref in refs):
            return False
        self.nbytes = nbytes(tensor)
        self.is_reported = True
        return True
