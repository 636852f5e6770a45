"""Count the hooks on a module by reading its dicts, without calling code of the training.

Source: torch/nn/modules/module.py `Module.__init__`, 2.13; older versions have fewer of these dicts.
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
        The number of hooks by kind, such as `forward_pre`, and by the origin of their function, as `module:name`.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for attribute, kind in KINDS.items():
        for function in list(entries(attributes_of(module).get(attribute)).values()):
            counts[kind, home(function)] += 1
    return counts


def home(function: Any) -> str:
    """Return where a function was defined, as `module:name`; for another callable object, its class."""
    while True:
        kind = type(function)
        if issubclass(kind, functools.partial):
            function = functools.partial.func.__get__(function)  # reads the slot, bypassing overrides of a subclass
        elif kind is MethodType:
            function = function.__func__
        elif kind.__name__ == "_WrappedHook":  # torch's wrapper of hooks that get the module
            function = peek(function, "hook")
        else:
            own = attributes_of(function)  # where functools.wraps stores the names on a callable object
            named = function if kind in _FUNCTIONS else kind
            return f"{own.get('__module__') or named.__module__}:{own.get('__qualname__') or named.__qualname__}"
