"""Hooks on the gradients of parameters, where a plugin listens to `param_grad`. Runs in the target."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hookd.agent.names import Model, Names
    from hookd.agent.session import Session
    from hookd.events import Module


class Parameters:
    """All of these hooks; each parameter has one at most."""

    def __init__(self, session: Session, names: Names) -> None:
        self._session = session
        self._names = names
        self._hooked: dict[int, tuple[Any, Any]] = {}

    def hook(self, model: Model) -> None:
        """Hook what is new in a model."""
        if not self._session.registry.ordered("param_grad"):
            return
        root = model.ref() if model.ref is not None else None
        if root is None or not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            return
        for ref, owner, module in list(self._names.known.values()):
            held = ref()
            if owner is model and held is not None:
                for name, parameter in held._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        self._hook(parameter, module, name)

    def _hook(self, parameter: Any, module: Module, name: str) -> None:
        known = self._hooked.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return
        prefix = "" if not module.depth else f"{module.name}."

        def accumulated(param: Any) -> None:
            session = self._session
            if session.is_live and param.grad is not None:
                values = {"module": module, "name": prefix + name, "param": param, "grad": param.grad}
                session.dispatch.emit("param_grad", values, module)

        handle = parameter.register_post_accumulate_grad_hook(accumulated)
        self._hooked[id(parameter)] = (weakref.ref(parameter), handle)

    def forget_dead(self) -> None:
        """Forget parameters that are gone."""
        for key in [key for key, (ref, _) in list(self._hooked.items()) if ref() is None]:
            self._hooked.pop(key, None)

    def restore(self) -> None:
        """Take back all hooks."""
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
