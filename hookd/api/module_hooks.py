"""Who has hooks on a module: a look into its own dicts, which calls nothing of the training's. Runs in the target.

Source: torch/nn/modules/module.py `Module.__init__`, 2.13; older versions have fewer of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from hookd.api.passive import attributes_of, entries, peek

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

_FUNCTIONS = (FunctionType, BuiltinFunctionType)


def hooks_on(module: nn.Module) -> Counter[tuple[str, str]]:
    """Count the hooks on a module: those of the training code, of accelerate, FSDP, peft...

    Returns:
        How many there are by kind, as in `forward_pre`, and by where their function is from, as `module:name`.
    """
    found: Counter[tuple[str, str]] = Counter()
    for attribute, kind in KINDS.items():
        for function in list(entries(attributes_of(module).get(attribute)).values()):
            found[kind, home(function)] += 1
    return found


def home(function: Any) -> str:
    """Say where a function is from, as `module:name`; of an object that can be called, its class."""
    while True:
        kind = type(function)
        if issubclass(kind, functools.partial):
            function = functools.partial.func.__get__(function)  # a slot
        elif kind is MethodType:
            function = function.__func__
        elif kind.__name__ == "_WrappedHook":  # torch's own, around hooks that get the module
            function = peek(function, "hook")
        else:
            own = attributes_of(function)  # of one that functools has wrapped
            named = function if kind in _FUNCTIONS else kind
            return f"{own.get('__module__') or named.__module__}:{own.get('__qualname__') or named.__qualname__}"
