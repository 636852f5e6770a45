"""Describe a module and its arguments as JSON, and collect their tensors."""

from __future__ import annotations

import dataclasses
import keyword
import math
import numbers
import sys
import types
import weakref
from argparse import Namespace
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from hookd import attributes_of, children_of, peek
from hookd_capture.bundle.tensorfile import is_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from hookd_capture.bundle.manifest import ModuleRecord, TensorRecord

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
    """Describes values and collects their tensors; the same tensor has the same key everywhere.

    Args:
        is_readable: `Context.is_readable` of the plugin.

    Attributes:
        tensors: the training's own tensors by key; they must not be kept.
        notes: what could not be saved, with its path.
    """

    def __init__(self, is_readable: Callable[[Tensor], bool]) -> None:
        self._is_readable = is_readable
        self.tensors: dict[str, Tensor] = {}
        self.notes: list[str] = []
        self._keys: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._described = 0

    @property
    def size(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())

    def about(self) -> dict[str, TensorRecord]:
        """Return the properties of the tensors that the file of tensors does not have."""
        return {key: _about(tensor) for key, tensor in self.tensors.items()}

    def value(self, value: Any, path: str, depth: int = 0) -> Any:
        """Describe an argument, an output or an attribute of a module."""
        if issubclass(type(value), torch.Tensor):
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

        def named(items: Any) -> dict[str, object]:
            return {name: self.value(one, f"{path}.{name}", depth) for name, one in items}

        kind = type(value)
        for base in (tuple, list, dict):
            if issubclass(kind, base) and base.__len__(value) > MOST_ITEMS:
                return self._gone(path, f"{kind.__name__} of {base.__len__(value)} items")
        if issubclass(kind, tuple):
            fields, inside = getattr(kind, "_fields", None), tuple.__getitem__(value, slice(None))
            return (
                {"$tuple": each(inside)}
                if fields is None
                else {"$named": named(zip(fields, inside)), "class": kind.__name__}
            )
        if issubclass(kind, list):
            return each(list.__getitem__(value, slice(None)))
        if dataclasses.is_dataclass(kind):
            return {
                "$fields": named((one.name, peek(value, one.name)) for one in dataclasses.fields(kind)),
                "class": kind.__name__,
            }
        if issubclass(kind, (types.SimpleNamespace, Namespace)):
            return {"$fields": named(attributes_of(value).items()), "class": kind.__name__}
        if issubclass(kind, weakref.ref):  # RNNs have some to their own weights
            return {"$ref": self.value(weakref.ref.__call__(value), path, depth)}
        if issubclass(kind, dict):
            pairs = list(dict.items(value))
            return {
                "$dict": [[self.value(k, path, depth), self.value(v, f"{path}.{_key(k)}", depth)] for k, v in pairs]
            }
        return None

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, str]:
        key = self._keys.get(id(tensor))
        if key is None:
            why = _why_not(tensor)
            if not why and tensor.numel() and not self._is_readable(tensor):
                why = "a tensor whose memory was freed"
            if why:
                return self._gone(path, why)
            key = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
            self._keys[id(tensor)], self.tensors[key] = key, tensor
        return {"$tensor": key}

    def _gone(self, path: str, what: str) -> dict[str, str]:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(f"{path} is not in the bundle: {what}")
        return {"$gone": what}

    def module(self, module: nn.Module, path: str = "module") -> ModuleRecord:
        """Describe a module and everything in it."""
        kind = type(module)
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            self.notes.append(f"{path} was called through {kind.__name__}, which is not in the bundle")
            return self.module(children_of(module)[_WRAPPERS[kind.__name__]], path)
        if id(module) in self._modules:
            return {"$same": self._modules[id(module)]}
        self._modules[id(module)] = path
        hooks = [one for where in _HOOKS for one in _hooks(module, where)]
        self.notes += [f"{path} has a hook of others, which is not in the bundle: {one}" for one in hooks]
        children = children_of(module)
        own = attributes_of(module)
        return {
            "module": kind.__module__, "qualname": kind.__qualname__, "file": _file(kind), "hooks": hooks,
            "extra_repr": _extra_repr(module), "training": own.get("training") is True,
            "parameters": self._own(own.get("_parameters"), path),
            "buffers": self._own(own.get("_buffers"), path),
            "attributes": self._attributes(module, path),
            "children": {name: self.module(child, f"{path}.{name}") for name, child in children.items()},
            "empty": [name for name in _entries(own.get("_modules")) if name not in children],
        }  # fmt: skip

    def _attributes(self, module: nn.Module, path: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in list(attributes_of(module).items()):
            if is_data(name):
                found[name] = self.value(value, f"{path}.{name}")
            elif name not in _OWN_OF_MODULE:
                self._gone(f"{path}.{name}", f"a {type(value).__name__} under a name that a replay does not set")
        return found

    def _own(self, tensors: Any, path: str) -> dict[str, dict[str, str] | None]:
        inside = _entries(tensors)
        return {name: None if one is None else self._tensor(one, f"{path}.{name}") for name, one in inside.items()}


def _entries(table: Any) -> dict[str, Any]:
    """Return the entries of a module's own dict, bypassing methods of its class; a scripted module has no plain dict."""
    return dict(dict.items(table)) if issubclass(type(table), dict) else {}


def _key(key: Any) -> str:
    """Return a dict's key as part of a path, without calling a `__str__` of the training's own classes."""
    return str(key) if type(key) in (str, int, float, bool, tuple) else type(key).__name__


def is_data(name: str) -> bool:
    """Whether a name can be an attribute of a module's own, and hides nothing of torch's."""
    is_word = name.isidentifier() and not keyword.iskeyword(name)
    return is_word and not name.startswith("__") and name not in _OWN_OF_MODULE and not hasattr(torch.nn.Module, name)


def _plain(value: Any) -> Any:
    """Describe a value that contains no other values; None if it does, or is of an unknown kind."""
    kind: Any = type(value)
    if kind in (bool, int, str):
        return value if len(str(value)) <= LONGEST_TEXT else None
    is_numpys = kind.__module__ == "numpy" and issubclass(kind, numbers.Real)
    if issubclass(kind, int) or (is_numpys and issubclass(kind, numbers.Integral)):  # also enumerations of numbers
        return int.__int__(value) if issubclass(kind, int) else int(value)
    if issubclass(kind, float) or is_numpys:
        number = float.__float__(value) if issubclass(kind, float) else float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if kind is torch.dtype:
        return {"$dtype": str(value)[6:]}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is slice and all(one is None or type(one) is int for one in (value.start, value.stop, value.step)):
        return {"$slice": [value.start, value.stop, value.step]}
    name = value.__name__ if kind in (types.FunctionType, types.BuiltinFunctionType) else ""
    return {"$function": name} if name and vars(torch.nn.functional).get(name) is value else None


def _why_not(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved, "" if it can."""
    if type(tensor) not in _PLAIN:
        return f"a tensor of the class {type(tensor).__name__}"
    if getattr(tensor, "is_nested", False) or tensor.layout is not torch.strided:
        return f"a tensor of the layout {'nested' if tensor.is_sparse is False else tensor.layout}"
    if tensor.is_meta or tensor.is_quantized or not is_known(tensor.dtype):
        return f"a tensor of {tensor.device.type} and {tensor.dtype}"
    return ""


def _about(tensor: Tensor) -> TensorRecord:
    return {
        "dtype": str(tensor.dtype)[6:],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_parameter": type(tensor) is torch.nn.Parameter,
    }


def _hooks(module: nn.Module, where: str) -> list[str]:
    found = _entries(peek(module, f"_{where}_hooks"))
    return [f"{where} {_name(one)}" for one in found.values()]


def _name(function: Any) -> str:
    function = function.__func__ if type(function) is types.MethodType else function
    if type(function) is not types.FunctionType:
        return type(function).__qualname__
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _file(kind: type) -> str | None:
    found = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return found if isinstance(found, str) else None


def _extra_repr(module: nn.Module) -> str:
    """Return the `extra_repr` of a module of one of torch's own classes with plain parameters, else "".

    For other classes, and for computed weights, it may run any code.
    """
    own = attributes_of(module)
    is_plain = "extra_repr" not in own and type(own.get("_parameters")) in (dict, OrderedDict)
    if not is_plain or not type(module).__module__.startswith("torch.nn.modules."):
        return ""
    try:
        return module.extra_repr()[:LONGEST_TEXT]
    except Exception:  # noqa: BLE001 - a description, no more
        return ""
