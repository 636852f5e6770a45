"""Descriptions of the current models for `hookd snapshot`: modules, tensors, hooks, and hookd's coverage of each.

A snapshot is made in parts, one per request, in hookd's own thread: a part keeps the interpreter from the training for a few
milliseconds. Between parts it keeps no object of the training alive. It reads the modules' own dicts and the
attributes of tensors: no data, no device, and no method that a user may have overridden. A tensor's subclass can override
them, so `torch.Tensor`'s own are called, without `__torch_function__`.
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
    from hookd.wire.agent import Request
    from hookd.wire.model import HookRow, ModuleDescription, SnapshotPart, TensorRow

PART_S = 0.003
"""A part ends after this time,"""
PART_ROWS = 256
"""or after this number of modules."""
MOST_TENSORS = 4096
"""The most parameters, or buffers, of one module that are described."""
MOST_HOOKS = 64
"""The most hooks on one module and its parameters that are described."""
MOST_NAME = 256
"""The longest name in characters."""
_Lazy: Any = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # torch's stubs lack it


class Trees:
    """Answers snapshot requests, with one walk per connection."""

    def __init__(self, models: Models, registry: Registry) -> None:
        self._models, self._registry = models, registry
        self._cursors: weakref.WeakKeyDictionary[Any, SnapshotCursor] = weakref.WeakKeyDictionary()

    def part(self, request: Request, connection: object) -> SnapshotPart:
        """Return the next modules of the connection's walk, or of a new one if the request contains `begin`.

        Returns:
            `modules`: a dict for each, parents first, see `SnapshotCursor.row`; `is_over`: whether these were the last.
        """
        if request.get("begin") or connection not in self._cursors:
            self._cursors[connection] = SnapshotCursor(self._models, self._registry)
        cursor = self._cursors[connection]
        rows: list[ModuleDescription] = []
        end = clock.perf_counter() + PART_S
        # At least one module: the tool takes an empty part that is not the last for a foreign answer.
        while not rows or (len(rows) < PART_ROWS and clock.perf_counter() < end):
            row = cursor.row()
            if row is None:
                del self._cursors[connection]
                return {"modules": rows, "is_over": True}
            rows.append(row)
        return {"modules": rows, "is_over": False}


class SnapshotCursor:
    """An iteration over all models that are alive."""

    def __init__(self, models: Models, registry: Registry) -> None:
        self._models = models
        self._walks: list[tuple[Model, Walk]] = [
            (model, Walk(root)) for model, root in reversed(list(models.names.live_roots()))
        ]
        # Only names: a hundred thousand weak references would cause full garbage collections. The cost is that a tensor
        # created during the walk at the address of a freed one is taken for it.
        self._named: dict[int, str] = {}
        self._plugins = {entry.number: entry.name for entry in registry}

    def row(self) -> ModuleDescription | None:
        """Describe the next module; return None after the last one.

        Returns:
            `name` as in the page, `root` (its model's ordinal), `class`, `home` (the Python module of its class), `training`
            (None: it has no such flag), `wrapped` (it is inside the wrapper of the same name before it), `seen`, `plugins`
            that listen there, `parameters`, `buffers`, `hooks`, and `left_out`: how many of the last three were left out.
        """
        while self._walks:
            model, walk = self._walks[-1]
            following = next(walk, None)
            if following is not None:
                path, module, wrapped, _ = following
                with plainly():
                    return self._row(model, model.prefix + (path or ROOT), module, wrapped=wrapped)
            self._walks.pop()
        return None

    def _row(self, model: Model, name: str, module: nn.Module, *, wrapped: bool) -> ModuleDescription:
        kind, attributes = type(module), attributes_of(module)
        parameters, left_out = _first(attributes.get("_parameters"))
        buffers, more_left_out = _first(attributes.get("_buffers"))
        transient = attributes.get("_non_persistent_buffers_set", ())
        hooks = _hooks(module, parameters)
        seen, plugins = self._seen(model, module)
        prefix = "" if name == ROOT else name.replace("." + ROOT, "") + "."
        training = attributes.get("training")
        return {
            "name": clean(name, MOST_NAME * 4), "root": model.ordinal,
            "class": clean(kind.__name__, MOST_NAME), "home": clean(str(kind.__module__), MOST_NAME),
            "training": training if isinstance(training, bool) else None, "wrapped": wrapped,
            "seen": seen, "plugins": plugins,
            "parameters": [self._tensor(prefix, key, tensor) for key, tensor in parameters],
            "buffers": [{**self._tensor(prefix, key, tensor), "persistent": key not in transient} for key, tensor in buffers],
            "hooks": hooks[:MOST_HOOKS], "left_out": left_out + more_left_out + max(0, len(hooks) - MOST_HOOKS),
        }  # fmt: skip

    def _tensor(self, prefix: str, key: str, tensor: Any) -> TensorRow:
        name = clean(prefix + key, MOST_NAME * 4)
        before = self._named.get(id(tensor))
        if before is not None:
            return {"name": clean(key, MOST_NAME), "same_as": before}
        self._named[id(tensor)] = name
        return {"name": clean(key, MOST_NAME), **described(tensor)}

    def _seen(self, model: Model, module: nn.Module) -> tuple[str, list[str]]:
        """Return hookd's coverage of a module, and the names of the plugins that listen there."""
        models = self._models
        known = models.names.known.get(id(module))
        if known is None or known[0]() is not module:
            return ("unlearnt" if model.walk is not None else "left_out" if model.is_cut else "never_called"), []
        _, owner, named = known
        state = models.coverage.state(id(module), module, owner, named)
        if not state:
            state = "container" if has_no_forward(module) else "unheard"
        numbers = models.routing.listening(named) if state not in ("container", "compiled", "scripted") else ()
        return state, [self._plugins[number] for number in numbers if number in self._plugins]


def described(tensor: Any) -> TensorRow:
    """Describe a tensor without its data: `shape`, `dtype`, `device`, `requires_grad`, `elements`, `bytes`.

    For a DTensor the values are those of this rank's part, and `global_shape` is the shape of the whole. A value that cannot
    be read is left out. `class` is present for any class other than Tensor and Parameter.
    """
    row: TensorRow = {}
    kind = type(tensor)
    if kind not in (torch.Tensor, nn.Parameter):
        row["class"] = clean(kind.__name__, MOST_NAME)
    if issubclass(kind, _Lazy):
        return {**row, "uninitialized": True}
    try:
        row["dtype"] = str(of_tensor(tensor, "dtype")).rpartition(".")[2]
        row["device"] = str(of_tensor(tensor, "device"))
        row["requires_grad"] = bool(of_tensor(tensor, "requires_grad"))
        if kind.__name__ == "DTensor":
            row["global_shape"] = list(of_tensor(tensor, "shape"))[:64]
            tensor = peek(tensor, "_local_tensor")
        row["shape"], row["elements"] = list(of_tensor(tensor, "shape"))[:64], int(torch.Tensor.numel(tensor))
        if of_tensor(tensor, "layout") is torch.strided:
            row["bytes"] = row["elements"] * int(torch.Tensor.element_size(tensor))
        else:
            row["layout"] = str(of_tensor(tensor, "layout")).rpartition(".")[2]
    except Failure as failure:  # a subclass that raises
        row["unknown"] = clean(worded(failure), MOST_NAME)
    return row


def _first(table: Any) -> tuple[list[tuple[str, Any]], int]:
    """Return the tensors of a module's dict, at most MOST_TENSORS, and the number of further ones."""
    items = list(entries(table).items())
    tensors = [(str(key), value) for key, value in items if issubclass(type(value), torch.Tensor)]
    return tensors[:MOST_TENSORS], max(0, len(tensors) - MOST_TENSORS)


def _hooks(module: nn.Module, parameters: Iterable[tuple[str, Any]]) -> list[HookRow]:
    """List the hooks other than hookd's on a module and its parameters; equal ones on a module once, with their count."""
    rows: list[HookRow] = [
        {"kind": kind, "function": clean(where, MOST_NAME), "count": count}
        for (kind, where), count in hooks_on(module).items()
    ]
    for name, parameter in parameters:
        for attribute, kind in (("_backward_hooks", "grad"), ("_post_accumulate_grad_hooks", "post_accumulate_grad")):
            functions = of_tensor(parameter, attribute) if hasattr(torch.Tensor, attribute) else None
            for function in list(functions.values()) if functions else ():
                if type(function) is not FunctionType or not is_ours(function.__code__.co_filename):
                    on = clean(name, MOST_NAME)
                    rows.append({"kind": kind, "function": clean(home(function), MOST_NAME), "count": 1, "on": on})
    return rows
