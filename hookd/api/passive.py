"""Read what objects of the training hold, and run no code of theirs. Runs in the target.

To read `module.weight` may be to compute it (a parametrization, a property, `__getattr__`), and a method such as
`named_parameters` may be overridden: either can change the training. So hookd and its plugins read attributes of modules and
optimizers through this file alone, and it looks into the dicts that they keep their attributes in.

Source: torch/nn/modules/module.py `Module.__init__`, torch/nn/utils/parametrize.py `ParametrizationList.__init__`, 2.14.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

_TABLES = ("_parameters", "_buffers", "_modules")
_SCRIPTED = ("torch.jit._script",)
"""Where torch's own tables are from that are no dicts."""
_MISSING: Any = object()
# Past what a metaclass has put in their place.
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
        default: for an attribute that there is not, and for one that only code can tell: a property, a parametrized weight.

    Returns:
        What the object's own dict has, then its parameters, buffers and submodules, then a constant of its class.
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


def attributes_of(holder: object) -> dict[str, Any]:
    """Return the dict in which an object keeps its attributes; never change it."""
    try:
        found: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # it has slots alone
        return {}
    return found


def parameters_of(module: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that a module itself holds; of a parametrized weight its submodules hold the originals."""
    return _present(module, "_parameters")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a module itself holds."""
    return _present(module, "_buffers")


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that a module itself holds."""
    return _present(module, "_modules")


def modules_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what torch's own `named_modules` does: a module and all below it with their paths, each once, parents first."""
    todo, known = [("", root)], set()
    while todo:
        path, module = todo.pop()
        if id(module) not in known:
            known.add(id(module))
            yield path, module
            prefix = f"{path}." if path else ""
            todo += [(prefix + name, child) for name, child in reversed(list(children_of(module).items()))]


def parameters_in(root: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield what torch's own `named_parameters` does: all parameters of a module and those below it, each once."""
    known = set()
    for path, module in modules_in(root):
        for name, parameter in list(parameters_of(module).items()):
            if id(parameter) not in known:
                known.add(id(parameter))
                yield f"{path}.{name}" if path else name, parameter


def originals_of(module: nn.Module, name: str) -> list[Tensor]:
    """Return the tensor that a module holds under a name; of one that is parametrized those that it is computed from."""
    own = peek(module, name)
    if own is not None:
        return [own] if issubclass(type(own), sys.modules["torch"].Tensor) else []
    parametrizations = children_of(module).get("parametrizations")
    computed = None if parametrizations is None else children_of(parametrizations).get(name)
    if computed is None:
        return []
    own_tensors = {**parameters_of(computed), **buffers_of(computed)}
    return [tensor for one, tensor in own_tensors.items() if one.startswith("original")]


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor gets gradients."""
    return bool(of_tensor(tensor, "requires_grad"))


def of_tensor(tensor: Tensor, name: str) -> Any:
    """Return an attribute of torch's own of a tensor (`grad`, `shape`, `_version`), past what its class makes of it.

    None where this version of torch has no such attribute.
    """
    found = getattr(sys.modules["torch"].Tensor, name, None)
    with plainly():
        return None if found is None else found.__get__(tensor)


def hook_gradient(parameter: Any, hook: Any) -> Any:
    """Have a hook called when a parameter has got its gradient; return its handle."""
    with plainly():
        return sys.modules["torch"].Tensor.register_post_accumulate_grad_hook(parameter, hook)


def plainly() -> AbstractContextManager[None]:
    """Return a context in which tensors are torch's own: no function mode and no tensor's class is told what is asked."""
    made: AbstractContextManager[None] = sys.modules["torch"]._C.DisableTorchFunction()  # noqa: SLF001 - the only name
    return made


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups as plain dicts; "params" is a plain list. Never change them."""
    return [_plain_group(group) for group in _plain_list(peek(optimizer, "param_groups"))]


def _plain_group(group: Any) -> dict[str, Any]:
    if type(group) is dict and type(group.get("params")) is list:
        return group
    found = entries(group)
    return {**found, "params": _plain_list(found.get("params"))}


def _plain_list(items: Any) -> list[Any]:
    if type(items) is list:
        return items
    return list.__getitem__(items, slice(None)) if issubclass(type(items), list) else []


def _present(module: nn.Module, table: str) -> dict[str, Any]:
    found = entries(attributes_of(module).get(table))
    return {name: value for name, value in list(found.items()) if value is not None}


def entries(table: Any) -> dict[str, Any]:
    """Return what is in a dict, past what its class makes of it: DeepSpeed's gathers the parameters that it is asked for."""
    kind = type(table)
    if kind is dict or kind is OrderedDict:
        return table  # type: ignore[no-any-return]
    if issubclass(kind, OrderedDict):
        return dict(OrderedDict.items(table))
    if issubclass(kind, dict):
        return dict(dict.items(table))
    if module_name_of(kind) in _SCRIPTED:  # a scripted module's
        return dict(table.items())
    return {}


def _constant(holder: object, name: str, default: Any) -> Any:
    """Return what the class has under a name, if that is no code; a slot is a place and no code."""
    found = class_attribute(type(holder), name, _MISSING)
    if type(found) is MemberDescriptorType:
        try:
            return found.__get__(holder)
        except AttributeError:  # nothing has been put there
            return default
    is_code = class_attribute(type(found), "__get__", _MISSING) is not _MISSING
    return default if is_code or found is _MISSING else found


def class_attribute(kind: type, name: str, default: Any = None) -> Any:
    """Return what a class or one of its bases has under a name, as it stands there."""
    for base in classes_of(kind):
        found = _namespace(base).get(name, _MISSING)
        if found is not _MISSING:
            return found
    return default
