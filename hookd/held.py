"""Who has hooks on a module: a look into its own dicts, which calls nothing of the training's. Runs in the target.

Source: torch/nn/modules/module.py `Module.__init__`, 2.13; older versions have fewer of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

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


def hooks_on(module: nn.Module) -> Counter[tuple[str, str]]:
    """Count the hooks on a module: those of the training code, of accelerate, FSDP, peft...

    Returns:
        How many there are by kind, as in `forward_pre`, and by where their function is from, as `module:name`.
    """
    found: Counter[tuple[str, str]] = Counter()
    for attribute, kind in KINDS.items():
        for function in list((vars(module).get(attribute) or {}).values()):
            found[kind, home(function)] += 1
    return found


def home(function: Any) -> str:
    """Say where a function is from, as `module:name`; of an object that can be called, its class."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif type(function).__name__ == "_WrappedHook":  # torch's own, around hooks that get the module
            function = function.hook
        else:
            named = function if isinstance(getattr(function, "__qualname__", None), str) else type(function)
            return f"{named.__module__}:{named.__qualname__}"
