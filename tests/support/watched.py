"""Whether calls of modules are watched in this process: `nn.Module.__call__` is entered in C, or replaced."""

from __future__ import annotations

import ctypes

from torch import nn

_entry_of = ctypes.pythonapi.PyVectorcall_Function
_entry_of.restype, _entry_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def is_replaced() -> bool:
    """Whether another function stands in the place of torch's own."""
    return nn.Module.__dict__["__call__"].__code__.co_filename != nn.Module._call_impl.__code__.co_filename


def is_entered() -> bool:
    """Whether the function has another entry than Python functions have by themselves."""
    return bool(_entry_of(nn.Module.__dict__["__call__"]) != _entry_of(is_entered))


def is_watched() -> bool:
    """Whether either is so."""
    return is_replaced() or is_entered()
