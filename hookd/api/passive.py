"""Read attributes of the training's objects without running their code.

Reading `module.weight` may compute it (a parametrization, a property, `__getattr__`), and a method such as `named_parameters`
may be overridden: either can change the training. So hookd and its plugins read attributes of modules and optimizers only
through this file, which reads the dicts in which objects keep their attributes.

Source: torch/nn/modules/module.py `Module.__init__`, torch/nn/utils/parametrize.py `ParametrizationList.__init__`, 2.14.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

_TABLES = ("_parameters", "_buffers", "_modules")
_SCRIPTED = ("torch.jit._script",)
"""The modules that define torch's own tables of other types than dict."""
_MISSING: Any = object()
# Descriptors of `type` bypass overrides in a metaclass.
classes_of: Any = type.__dict__["__mro__"].__get__
"""Return a class and its bases in the order in which attributes are looked up."""
_namespace: Any = type.__dict__["__dict__"].__get__
module_name_of: Any = type.__dict__["__module__"].__get__
"""Return the name of the module in which a class is defined."""


def peek(holder: object, name: str, default: Any = None) -> Any:
    """Return the plain value of an attribute.

    Args:
        holder: a module, an optimizer or another object of the training.
        name: of the attribute.
        default: returned for a missing attribute, and for one that only code can compute: a property, a parametrized weight.

    Returns:
        The first match in the object's own dict, its parameters, buffers and submodules, and the constants of its class.
    """
    own = attributes_of(holder)
    if name in own:
        return own[name]
    for table in _TABLES:
        if table in own:
            found = entries(own[table]).get(name, _MISSING)
            if found is not _MISSING:
                return found
    return _constant(holder, name, default)


def attributes_of(holder: object) -> Mapping[str, Any]:
    """Return the dict in which an object keeps its attributes; never change it."""
    try:
        own: Mapping[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # it has only slots
        return {}
    return own


def parameters_of(module: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that a module itself holds; the originals of a parametrized weight are in submodules."""
    return _present(module, "_parameters")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a module itself holds."""
    return _present(module, "_buffers")


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a module itself holds."""
    return _present(module, "_modules")


def modules_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all modules below it, with their paths, each once, parents first; like torch's `named_modules`."""
    todo, known = [("", root)], set()
    while todo:
        path, module = todo.pop()
        if id(module) not in known:
            known.add(id(module))
            yield path, module
            prefix = f"{path}." if path else ""
            todo += [(prefix + name, child) for name, child in reversed(list(children_of(module).items()))]


def parameters_in(root: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield all parameters of a module and of those below it, each once; like torch's `named_parameters`."""
    known = set()
    for path, module in modules_in(root):
        for name, parameter in list(parameters_of(module).items()):
            if id(parameter) not in known:
                known.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def originals_of(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensor that a module holds under a name; if it is parametrized, those from which it is computed."""
    own = peek(module, name)
    if own is not None:
        return [own] if issubclass(type(own), sys.modules["torch"].Tensor) else []
    parametrizations = children_of(module).get("parametrizations")
    computed = None if parametrizations is None else children_of(parametrizations).get(name)
    if computed is None:
        return []
    own_tensors = {**parameters_of(computed), **buffers_of(computed)}
    return [tensor for key, tensor in own_tensors.items() if key.startswith("original")]


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor gets gradients."""
    return bool(of_tensor(tensor, "requires_grad"))


def of_tensor(tensor: Tensor, name: str) -> Any:
    """Return torch's own attribute of a tensor (`grad`, `shape`, `_version`), bypassing overrides of a subclass.

    None if this version of torch has no such attribute.
    """
    descriptor = getattr(sys.modules["torch"].Tensor, name, None)
    with plainly():
        return None if descriptor is None else descriptor.__get__(tensor)


def hook_gradient(parameter: Any, hook: Any) -> Any:
    """Register a hook that is called when the gradient of a parameter has been accumulated; return its handle."""
    with plainly():
        return sys.modules["torch"].Tensor.register_post_accumulate_grad_hook(parameter, hook)


def plainly() -> AbstractContextManager[None]:
    """Return a context that disables `__torch_function__`, of function modes and of tensor subclasses."""
    made: AbstractContextManager[None] = sys.modules["torch"]._C.DisableTorchFunction()  # noqa: SLF001 - the only name
    return made


def groups_of(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """Return an optimizer's parameter groups as plain dicts; "params" is a plain list. Never change them."""
    return [_plain_group(group) for group in _plain_list(peek(optimizer, "param_groups"))]


def _plain_group(group: Any) -> Mapping[str, Any]:
    if type(group) is dict and type(group.get("params")) is list:
        return group
    plain = entries(group)
    return {**plain, "params": _plain_list(plain.get("params"))}


def _plain_list(items: Any) -> list[Any]:
    if type(items) is list:
        return items
    return list.__getitem__(items, slice(None)) if issubclass(type(items), list) else []


def _present(module: nn.Module, table: str) -> dict[str, Any]:
    rows = entries(attributes_of(module).get(table))
    return {name: value for name, value in list(rows.items()) if value is not None} if rows else {}


def entries(table: Any) -> Mapping[str, Any]:
    """Return the contents of a dict, bypassing overrides of its class."""
    kind = type(table)  # DeepSpeed's subclass gathers a parameter when it is read
    if kind is dict or kind is OrderedDict:
        return table  # type: ignore[no-any-return]
    if issubclass(kind, OrderedDict):
        return dict(OrderedDict.items(table))
    if issubclass(kind, dict):
        return dict(dict.items(table))
    if module_name_of(kind) in _SCRIPTED:  # the table of a scripted module
        return dict(table.items())
    return {}


def _constant(holder: object, name: str, default: Any) -> Any:
    """Return a class attribute, or the value of a slot; `default` for any other descriptor, since that is code."""
    value = class_attribute(type(holder), name, _MISSING)
    if type(value) is MemberDescriptorType:
        try:
            return value.__get__(holder)
        except AttributeError:  # the slot is empty
            return default
    is_code = class_attribute(type(value), "__get__", _MISSING) is not _MISSING
    return default if is_code or value is _MISSING else value


def class_attribute(kind: type, name: str, default: Any = None) -> Any:
    """Return an attribute of a class or one of its bases as stored, without calling descriptors."""
    for base in classes_of(kind):
        found = _namespace(base).get(name, _MISSING)
        if found is not _MISSING:
            return found
    return default
