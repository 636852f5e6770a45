"""What a module holds, and who has hooks on it: a look into its own dicts. Runs in the target.

Source: torch/nn/modules/module.py `Module.__init__`, 2.13; older versions have fewer of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

KINDS = {
    "_forward_pre_hooks": "forward_pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward_pre",
    "_backward_hooks": "backward",
    "_state_dict_pre_hooks": "state_dict_pre",
    "_state_dict_hooks": "state_dict",
    "_load_state_dict_pre_hooks": "load_state_dict_pre",
    "_load_state_dict_post_hooks": "load_state_dict",
}


def hooks(module: nn.Module) -> Counter[tuple[str, str]]:
    """Count the hooks on a module by kind and by where their function is from."""
    found: Counter[tuple[str, str]] = Counter()
    for attribute, kind in KINDS.items():
        for function in list((vars(module).get(attribute) or {}).values()):
            found[kind, home(function)] += 1
    return found


def home(function: Any) -> str:
    """Say where a hook is from, as `module:name`; of an object that can be called, its class."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif type(function).__name__ == "_WrappedHook":  # torch's own, around hooks that get the module
            function = function.hook
        else:
            named = function if isinstance(getattr(function, "__qualname__", None), str) else type(function)
            return f"{named.__module__}:{named.__qualname__}"


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
