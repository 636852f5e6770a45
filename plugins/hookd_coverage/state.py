"""What a module itself holds, a look into its own dicts, and what it is called in. Runs in the target."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookd import buffers_of, of_tensor, parameters_of, peek

_transform = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)  # noqa: SLF001 - the only name


def is_transformed() -> bool:
    """Whether this is inside a transform of `torch.func`, in the calling thread."""
    return _transform() is not None


def elements(module: nn.Module) -> Counter[str]:
    """Count the elements that a module itself holds, by kind."""
    found: Counter[str] = Counter()
    for parameter in parameters_of(module).values():
        found["parameter" if of_tensor(parameter, "requires_grad") else "frozen"] += _elements(parameter)
    transient = peek(module, "_non_persistent_buffers_set", ())
    for name, buffer in buffers_of(module).items():
        found["transient" if name in transient else "buffer"] += _elements(buffer)
    return +found


def _elements(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) else Tensor.numel(tensor)
