"""Count the elements of a module, and detect transforms of `torch.func`."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookd import buffers_of, of_tensor, parameters_of, peek

_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)  # noqa: SLF001 - the only name


def is_transformed() -> bool:
    """Whether the calling thread is inside a transform of `torch.func`."""
    return _transform() is not None


def elements(module: nn.Module) -> Counter[str]:
    """Count the elements of a module's own parameters and buffers, by kind."""
    counts: Counter[str] = Counter()
    for parameter in parameters_of(module).values():
        counts["parameter" if of_tensor(parameter, "requires_grad") else "frozen"] += _elements(parameter)
    transient = peek(module, "_non_persistent_buffers_set", ())
    for name, buffer in buffers_of(module).items():
        counts["transient" if name in transient else "buffer"] += _elements(buffer)
    return +counts


def _elements(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else Tensor.numel(tensor)
