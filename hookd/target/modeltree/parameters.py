"""Hooks on the gradients of parameters, for plugins that listen to `param_grad`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.api.passive import hook_gradient, of_tensor, parameters_in, parameters_of, requires_grad

if TYPE_CHECKING:
    from hookd.api.events import Module
    from hookd.target.boot.arming import Life
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.modeltree.names import Model, Names
    from hookd.target.plugins.listeners import Registry


class Parameters:
    """The hooks on parameters, at most one on each."""

    def __init__(self, *, names: Names, life: Life, registry: Registry, dispatch: Dispatch) -> None:
        self._names, self._life, self._registry, self._dispatch = names, life, registry, dispatch
        self._hooked: dict[int, Any] = {}

    def hook(self, model: Model) -> None:
        """Hook the new parameters of a model."""
        if not self._registry.ordered("param_grad"):
            return
        root = model.live_root
        if root is None or not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            return
        for ref, owner, module in list(self._names.known.values()):
            nn_module = ref()
            if owner is model and nn_module is not None:
                for name, parameter in parameters_of(nn_module).items():
                    if requires_grad(parameter):
                        self._hook(parameter, module, name)

    def _hook(self, parameter: Any, module: Module, name: str) -> None:
        handle = self._hooked.get(id(parameter))
        if handle is not None and handle.id in (of_tensor(parameter, "_post_accumulate_grad_hooks") or ()):
            return
        prefix = "" if not module.depth else f"{module.name}."

        def accumulated(param: Any) -> None:
            if not self._life.is_live:
                return
            grad = of_tensor(param, "grad")
            if grad is not None:
                values = {"module": module, "name": prefix + name, "param": param, "grad": grad}
                self._dispatch.emit("param_grad", values, module)

        self._hooked[id(parameter)] = hook_gradient(parameter, self._dispatch.callback(accumulated))

    def forget(self, model: Model) -> None:
        """Remove the hooks of a model whose parameters will get new ones, under other names."""
        root = model.live_root
        for _, parameter in parameters_in(root) if root is not None else ():
            handle = self._hooked.pop(id(parameter), None)
            if handle is not None:
                handle.remove()

    def restore(self) -> None:
        """Remove all hooks."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
