"""The models as they are now, for `hookd snapshot`: modules, tensors, hooks, what hookd sees of each. Runs in the target.

A tour is made in portions, one for each request, in hookd's own thread: the training waits for the interpreter for as long
as a portion takes, a few milliseconds. Between them it keeps nothing of the training's alive. It reads what the modules
hold in their own dicts and what tensors know of themselves: no data, no device, and no method that a user may have
overridden (a tensor's subclass can: hence `torch.Tensor`'s own, without `__torch_function__`).
"""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd.api.module_hooks import home, hooks_on
from hookd.api.passive import attributes_of, entries, of_tensor, peek, plainly
from hookd.errors import worded
from hookd.target.entry.threads import is_ours
from hookd.target.modeltree.module_coverage import has_no_forward
from hookd.target.modeltree.names import Walk
from hookd.target.plugins.faults import Failure
from hookd.wire.module_names import ROOT
from hookd.wire.originals import clock
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.target.modeltree.models import Models
    from hookd.target.modeltree.names import Model
    from hookd.target.plugins.listeners import Registry

PORTION_S = 0.003
"""After so long a portion ends;"""
PORTION_ROWS = 256
"""or after so many modules."""
MOST_TENSORS = 4096
"""So many parameters or buffers of one module are told one by one."""
MOST_HOOKS = 64
"""So many hooks of one module or of its parameters are."""
MOST_NAME = 256
"""Characters of a name."""
_Lazy: Any = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # torch's stubs lack it


class Trees:
    """Answers the requests of each connection."""

    def __init__(self, models: Models, registry: Registry) -> None:
        self._models, self._registry = models, registry
        self._tours: weakref.WeakKeyDictionary[Any, Tour] = weakref.WeakKeyDictionary()

    def portion(self, request: dict[str, Any], connection: object) -> dict[str, Any]:
        """Give the next modules, those of a new tour where the request says `begin`.

        Returns:
            `modules`: a dict for each, parents first, see `Tour.row`; `is_over`: there are no more.
        """
        if request.get("begin") or connection not in self._tours:
            self._tours[connection] = Tour(self._models, self._registry)
        tour = self._tours[connection]
        rows: list[dict[str, Any]] = []
        end = clock.perf_counter() + PORTION_S
        while len(rows) < PORTION_ROWS and clock.perf_counter() < end:
            row = tour.row()
            if row is None:
                del self._tours[connection]
                return {"modules": rows, "is_over": True}
            rows.append(row)
        return {"modules": rows, "is_over": False}


class Tour:
    """Goes through all models that are alive."""

    def __init__(self, models: Models, registry: Registry) -> None:
        self._models = models
        self._walks: list[tuple[Model, Walk]] = [
            (model, Walk(root)) for model, root in reversed(list(models.names.live_roots()))
        ]
        # Names alone: a hundred thousand weak references would make the garbage collector look through all that there is.
        # So a tensor made during the tour at the address of one that has gone meanwhile would be taken for it.
        self._told: dict[int, str] = {}
        self._plugins = {entry.number: entry.name for entry in registry}

    def row(self) -> dict[str, Any] | None:
        """Describe the next module, or give None when there is none.

        Returns:
            `name` as in the page, `root` its model's ordinal, `class`, `home` (the Python module of its class), `training`
            (None: it does not say), `wrapped` (it stands inside of the wrapper of the same name before it), `seen`,
            `plugins` that listen there, `parameters`, `buffers`, `hooks`, and how many of these were left out.
        """
        while self._walks:
            model, walk = self._walks[-1]
            found = next(walk, None)
            if found is not None:
                path, module, wrapped, _ = found
                prefix = f"#{model.ordinal}." if model.ordinal > 1 else ""
                with plainly():
                    return self._row(model, prefix + (path or ROOT), module, wrapped=wrapped)
            self._walks.pop()
        return None

    def _row(self, model: Model, name: str, module: nn.Module, *, wrapped: bool) -> dict[str, Any]:
        kind, held = type(module), attributes_of(module)
        parameters, left_out = _first(held.get("_parameters"))
        buffers, more_left_out = _first(held.get("_buffers"))
        transient = held.get("_non_persistent_buffers_set", ())
        hooks = _hooks(module, parameters)
        seen, plugins = self._seen(model, module)
        prefix = "" if name == ROOT else name.replace("." + ROOT, "") + "."
        training = held.get("training")
        return {
            "name": clean(name, MOST_NAME * 4), "root": model.ordinal,
            "class": clean(kind.__name__, MOST_NAME), "home": clean(str(kind.__module__), MOST_NAME),
            "training": training if isinstance(training, bool) else None, "wrapped": wrapped,
            "seen": seen, "plugins": plugins,
            "parameters": [self._tensor(prefix, key, one) for key, one in parameters],
            "buffers": [{**self._tensor(prefix, key, one), "persistent": key not in transient} for key, one in buffers],
            "hooks": hooks[:MOST_HOOKS], "left_out": left_out + more_left_out + max(0, len(hooks) - MOST_HOOKS),
        }  # fmt: skip

    def _tensor(self, prefix: str, key: str, tensor: Any) -> dict[str, Any]:
        name = clean(prefix + key, MOST_NAME * 4)
        before = self._told.get(id(tensor))
        if before is not None:
            return {"name": clean(key, MOST_NAME), "same_as": before}
        self._told[id(tensor)] = name
        return {"name": clean(key, MOST_NAME), **described(tensor)}

    def _seen(self, model: Model, module: nn.Module) -> tuple[str, list[str]]:
        """Give what hookd sees of a module, and the plugins that listen there."""
        models = self._models
        known = models.names.known.get(id(module))
        if known is None or known[0]() is not module:
            return ("unlearnt" if model.walk is not None else "left_out" if model.is_cut else "never_called"), []
        _, owner, named = known
        state = models.seen.state(id(module), module, owner, named)
        if not state:
            state = "container" if has_no_forward(module) else "unheard"
        numbers = models.audience.listening(named) if state not in ("container", "compiled", "scripted") else ()
        return state, [self._plugins[number] for number in numbers if number in self._plugins]


def described(tensor: Any) -> dict[str, Any]:
    """Say what a tensor is, without its data: `shape`, `dtype`, `device`, `requires_grad`, `elements`, `bytes`.

    Of a DTensor those of this rank's part count, and `global_shape` says what it is a part of. A part that cannot be had is
    left out; `class` is there for what is neither a plain tensor nor a parameter.
    """
    told: dict[str, Any] = {}
    kind = type(tensor)
    if kind not in (torch.Tensor, nn.Parameter):
        told["class"] = clean(kind.__name__, MOST_NAME)
    if issubclass(kind, _Lazy):
        return {**told, "uninitialized": True}
    try:
        told["dtype"] = str(of_tensor(tensor, "dtype")).rpartition(".")[2]
        told["device"] = str(of_tensor(tensor, "device"))
        told["requires_grad"] = bool(of_tensor(tensor, "requires_grad"))
        if kind.__name__ == "DTensor":
            told["global_shape"] = list(of_tensor(tensor, "shape"))[:64]
            tensor = peek(tensor, "_local_tensor")
        told["shape"], told["elements"] = list(of_tensor(tensor, "shape"))[:64], int(torch.Tensor.numel(tensor))
        if of_tensor(tensor, "layout") is torch.strided:
            told["bytes"] = told["elements"] * int(torch.Tensor.element_size(tensor))
        else:
            told["layout"] = str(of_tensor(tensor, "layout")).rpartition(".")[2]
    except Failure as failure:  # a subclass that answers for itself
        told["unknown"] = clean(worded(failure), MOST_NAME)
    return told


def _first(held: Any) -> tuple[list[tuple[str, Any]], int]:
    """Give the tensors of a module's dict, at most MOST_TENSORS, and how many more there are."""
    found = [(str(key), value) for key, value in list(entries(held).items()) if issubclass(type(value), torch.Tensor)]
    return found[:MOST_TENSORS], max(0, len(found) - MOST_TENSORS)


def _hooks(module: nn.Module, parameters: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """List the hooks of others on a module and on its parameters, the same ones once with their number."""
    found = [
        {"kind": kind, "function": clean(where, MOST_NAME), "count": count}
        for (kind, where), count in hooks_on(module).items()
    ]
    for name, parameter in parameters:
        for attribute, kind in (("_backward_hooks", "grad"), ("_post_accumulate_grad_hooks", "post_accumulate_grad")):
            functions = of_tensor(parameter, attribute) if hasattr(torch.Tensor, attribute) else None
            for function in list(functions.values()) if functions else ():
                if type(function) is not FunctionType or not is_ours(function.__code__.co_filename):
                    on = clean(name, MOST_NAME)
                    found.append({"kind": kind, "function": clean(home(function), MOST_NAME), "count": 1, "on": on})
    return found
