"""What a module and its arguments are, in words that JSON knows, with the tensors put aside. Runs in the target."""

from __future__ import annotations

import dataclasses
import keyword
import math
import numbers
import sys
import types
import weakref
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import torch

from hookd_nan.bundle.tensorfile import is_known

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_ITEMS = 4096
MOST_VALUES = 100_000
MOST_NOTES = 100
LONGEST_TEXT = 16384
DEEPEST = 16
_OWN_OF_MODULE = frozenset(torch.nn.Module().__dict__) | {"training"}
_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))


class Description:
    """Collects tensors while it describes what holds them; the same tensor is the same key wherever it is.

    Attributes:
        tensors: by key, the training's own; never to be kept.
        notes: what could not be carried, and where it was.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.notes: list[str] = []
        self._keys: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._described = 0

    @property
    def size(self) -> int:
        """How many bytes the tensors have."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())

    def about(self) -> dict[str, dict[str, Any]]:
        """Tell what the file of tensors does not."""
        return {key: _about(tensor) for key, tensor in self.tensors.items()}

    def value(self, value: Any, path: str, depth: int = 0) -> Any:
        """Describe what a module was called with, gave back or holds."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        plain = _plain(value)
        if plain is not None or value is None:
            return plain
        self._described += 1
        if depth < DEEPEST and self._described < MOST_VALUES:
            nested = self._nested(value, path, depth + 1)
            if nested is not None:
                return nested
        return self._gone(path, type(value).__name__)

    def _nested(self, value: Any, path: str, depth: int) -> Any:
        def each(items: Any) -> list[Any]:
            return [self.value(one, f"{path}.{at}", depth) for at, one in enumerate(items)]

        def named(items: Any) -> dict[str, Any]:
            return {name: self.value(one, f"{path}.{name}", depth) for name, one in items}

        if isinstance(value, (tuple, list, dict)) and len(value) > MOST_ITEMS:
            return self._gone(path, f"{type(value).__name__} of {len(value)} items")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"$named": named(zip(value._fields, value)), "class": type(value).__name__}
        if isinstance(value, tuple):
            return {"$tuple": each(value)}
        if isinstance(value, list):
            return each(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in dataclasses.fields(value)]
            return {"$fields": named((n, getattr(value, n, None)) for n in names), "class": type(value).__name__}
        if isinstance(value, (types.SimpleNamespace, Namespace)):
            return {"$fields": named(vars(value).items()), "class": type(value).__name__}
        if isinstance(value, weakref.ref):  # RNNs have some to their own weights
            return {"$ref": self.value(value(), path, depth)}
        if isinstance(value, dict):
            return {
                "$dict": [[self.value(k, path, depth), self.value(v, f"{path}.{k}", depth)] for k, v in value.items()]
            }
        return None

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, str]:
        key = self._keys.get(id(tensor))
        if key is None:
            why = _why_not(tensor)
            if why:
                return self._gone(path, why)
            key = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
            self._keys[id(tensor)], self.tensors[key] = key, tensor
        return {"$tensor": key}

    def _gone(self, path: str, what: str) -> dict[str, str]:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(f"{path} is not carried: {what}")
        return {"$gone": what}

    def module(self, module: nn.Module, path: str = "module") -> dict[str, Any]:
        """Describe a module and all that is in it."""
        kind = type(module)
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            self.notes.append(f"{path} was called through {kind.__name__}, which is not carried")
            return self.module(getattr(module, _WRAPPERS[kind.__name__]), path)
        if id(module) in self._modules:
            return {"$same": self._modules[id(module)]}
        self._modules[id(module)] = path
        hooks = [one for where in _HOOKS for one in _hooks(module, where)]
        self.notes += [f"{path} has a hook of others, which is not carried: {one}" for one in hooks]
        children = {name: c for name, c in module._modules.items() if c is not None}  # noqa: SLF001
        return {
            "module": kind.__module__, "qualname": kind.__qualname__, "file": _file(kind), "hooks": hooks,
            "extra_repr": _extra_repr(module), "training": module.training,
            "parameters": self._own(module._parameters, path),  # noqa: SLF001
            "buffers": self._own(module._buffers, path),  # noqa: SLF001
            "attributes": self._attributes(module, path),
            "children": {name: self.module(child, f"{path}.{name}") for name, child in children.items()},
            "empty": [name for name in module._modules if name not in children],  # noqa: SLF001
        }  # fmt: skip

    def _attributes(self, module: nn.Module, path: str) -> dict[str, Any]:
        found = {}
        for name, value in vars(module).items():
            if is_data(name):
                found[name] = self.value(value, f"{path}.{name}")
            elif name not in _OWN_OF_MODULE:
                self._gone(f"{path}.{name}", f"it was put on the object, a {type(value).__name__}")
        return found

    def _own(self, tensors: dict[str, Any], path: str) -> dict[str, Any]:
        return {name: None if one is None else self._tensor(one, f"{path}.{name}") for name, one in tensors.items()}


def is_data(name: str) -> bool:
    """Whether a name can be one of a module's own attributes, and takes the place of nothing of torch's."""
    is_word = name.isidentifier() and not keyword.iskeyword(name)
    return is_word and not name.startswith("__") and name not in _OWN_OF_MODULE and not hasattr(torch.nn.Module, name)


def _plain(value: Any) -> Any:
    """Describe what holds nothing; None for what does, or is of no known kind."""
    if isinstance(value, (bool, int, str)) and type(value) in (bool, int, str):
        return value if len(str(value)) <= LONGEST_TEXT else None
    if isinstance(value, numbers.Integral):  # numpy's, and enumerations of numbers
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value)[6:]}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, slice) and all(
        one is None or type(one) is int for one in (value.start, value.stop, value.step)
    ):
        return {"$slice": [value.start, value.stop, value.step]}
    name = getattr(value, "__name__", "")
    if name and isinstance(name, str) and vars(torch.nn.functional).get(name) is value:
        return {"$function": name}
    return None


def _why_not(tensor: Tensor) -> str:
    """Say why a tensor cannot be carried, "" if it can."""
    if type(tensor) not in _PLAIN:
        return f"a tensor of the class {type(tensor).__name__}"
    if getattr(tensor, "is_nested", False) or tensor.layout is not torch.strided:
        return f"a tensor of the layout {'nested' if tensor.is_sparse is False else tensor.layout}"
    if tensor.is_meta or tensor.is_quantized or not is_known(tensor.dtype):
        return f"a tensor of {tensor.device.type} and {tensor.dtype}"
    return ""


def _about(tensor: Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype)[6:],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_parameter": isinstance(tensor, torch.nn.Parameter),
    }


def _hooks(module: nn.Module, where: str) -> list[str]:
    found = getattr(module, f"_{where}_hooks", None) or {}
    return [f"{where} {_name(one)}" for one in found.values()]


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def _file(kind: type) -> str | None:
    found = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return found if isinstance(found, str) else None


def _extra_repr(module: nn.Module) -> str:
    """Give what its own `extra_repr` says: torch's classes alone, for others may do anything there."""
    if not type(module).__module__.startswith("torch."):
        return ""
    try:
        return module.extra_repr()[:LONGEST_TEXT]
    except Exception:  # noqa: BLE001 - a description, no more
        return ""
