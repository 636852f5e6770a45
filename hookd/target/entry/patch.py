"""Replacement of torch's functions, and their restoration.

`nn.Module.__call__` is replaced in the class: this is cheaper than torch's global hooks, sees keyword arguments and
exceptions, and changes no kernel. CPython 3.13+ stops caching attributes of a class after about 1,000 assignments, so the
class is assigned to only at attach and at detach.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from hookd.target.entry import dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

SKIP = object()
"""Sentinel: the module is not observed; call straight through."""

HAS_COMPILED_IMPL = hasattr(nn.Module, "_compiled_call_impl")


def is_pristine(call: Any) -> bool:
    """Whether `nn.Module.__call__` is torch's own. If it is, hookd may run its body instead of calling it."""
    code = getattr(call, "__code__", None)
    return code is not None and code.co_filename == nn.Module._call_impl.__code__.co_filename


def bare_of(original: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return a function that returns a module's own call, to be called directly: no frame of hookd's is left."""
    if not is_pristine(original):
        return functools.partial(MethodType, original)
    return _chosen if HAS_COMPILED_IMPL else attrgetter("_call_impl")


def _chosen(module: nn.Module) -> Callable[..., Any]:
    # Source: torch/nn/modules/module.py `_wrapped_call_impl`, 2.1 to 2.14.
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return module._call_impl if compiled is None else compiled


def make_call(plans: dict[int, Any], missing: Callable[..., Any], original: Any) -> Any:
    """Return the `__call__` that looks up a module's plan.

    It outlives a detach if something keeps a bound copy, as an OptimizedModule does. Then `plans` is empty, and `missing` calls
    through.
    """
    get, bare = plans.get, bare_of(original)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        plan = get(id(self))
        if plan is SKIP:
            return bare(self)(*args, **kwargs)
        if plan is None:
            return missing(self, args, kwargs)
        return plan(self, args, kwargs)

    call: Any = functools.update_wrapper(__call__, original)
    # A traceback of the training does not show hookd's source.
    call.__code__ = call.__code__.replace(co_filename="<hookd call>")
    del call.__wrapped__
    dynamo.stand_in(call, original)
    return call


def is_in_flight() -> bool:
    """Whether this thread is inside a module's call, be it one from before the attach or of an unnamed module."""
    code = nn.Module._call_impl.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


class ClassPatch:
    """A replacement of `nn.Module.__call__`.

    The original is restored only if the replacement is still in place.

    Attributes:
        why_patched: the reason why calls are not entered in C, for a person.
    """

    def __init__(self, missing: Callable[..., Any], why_patched: str) -> None:
        self.why_patched = why_patched
        self.plans: dict[int, Any] = {}
        self.original: Any = nn.Module.__dict__["__call__"]
        self.ours = make_call(self.plans, missing, self.original)

    def install(self) -> None:
        """Replace the function."""
        nn.Module.__call__ = self.ours  # type: ignore[method-assign]
        self.register()

    def register(self) -> None:
        """Register the replacement with dynamo. Called again from time to time, because dynamo may be loaded later."""
        dynamo.replace_call(self.original, self.ours)

    def restore(self) -> str:
        """Restore the original function; return a message if another patch on top of ours prevents it, else ""."""
        dynamo.replace_call(self.ours, self.original)
        if nn.Module.__dict__["__call__"] is self.ours:
            nn.Module.__call__ = self.original  # type: ignore[method-assign]
        if nn.Module.__dict__["__call__"] is self.original:
            return ""
        return (
            "nn.Module.__call__: another tool has patched it on top of hookd; hookd's function stays and calls through"
        )

    def close(self) -> None:
        """Drop the plans; the function outlives them if something keeps a bound copy."""
        self.plans.clear()


class Replaced:
    """A wrapper in the place of one function of a module or class.

    The original is restored only if the wrapper is still in place.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self.owner, self.name = owner, name
        self.original = owner.__dict__[name]
        ours: Any = wrap(self.original)
        self.ours = functools.update_wrapper(ours, self.original)
        del self.ours.__wrapped__
        dynamo.stand_in(ours, self.original)
        setattr(owner, name, self.ours)

    def restore(self) -> bool:
        """Restore the original; return False if something else has replaced the wrapper in the meantime."""
        if self.owner.__dict__.get(self.name) is not self.ours:
            return False
        setattr(self.owner, self.name, self.original)
        return True
