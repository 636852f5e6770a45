"""What a module itself holds: a look into its own dicts. Runs in the target."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.nn.parameter import is_lazy


def elements(module: nn.Module) -> Counter[str]:
    """Count the elements that a module itself holds, by kind."""
    found: Counter[str] = Counter()
    for parameter in list(module._parameters.values()):  # noqa: SLF001 - its children's do not count
        if parameter is not None and not is_lazy(parameter):
            found["parameter" if parameter.requires_grad else "frozen"] += parameter.numel()
    transient = vars(module).get("_non_persistent_buffers_set", ())
    for name, buffer in list(module._buffers.items()):  # noqa: SLF001 - its children's do not count
        if buffer is not None and not is_lazy(buffer):
            found["transient" if name in transient else "buffer"] += buffer.numel()
    return found
