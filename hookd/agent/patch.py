"""What the agent replaces in torch, and how it is put back. Runs in the target.

`nn.Module.__call__` is replaced at the class: cheaper than torch's global hooks, sees keyword arguments and
exceptions, changes no kernel. CPython 3.13+ stops caching attributes of a class after about 1,000 assignments, so the
class is assigned to at attach and at detach only.

torch.compile: our frames are skipped by dynamo (else one of them becomes the compiled frame of every compiled module,
which hits the recompile limit), our `__call__` is what dynamo knows as the unpatched one (else it inlines it), and
`is_dynamo_compiling` comes before anything that it could not trace: a module with hooks of its own it inlines anyway.
Source: torch/_dynamo/variables/nn_module.py `UnspecializedNNModuleVariable.call_function`, 2.13.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

SKIP = object()
"""What a known module that nobody wants to hear of has for a plan."""

HAS_COMPILED_IMPL = hasattr(nn.Module, "_compiled_call_impl")
_DYNAMO = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


def _never() -> bool:
    return False


is_dynamo_compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", _never)


def is_pristine(call: Any) -> bool:
    """Whether `nn.Module.__call__` is torch's own, whose body we may write out instead of calling it."""
    code = getattr(call, "__code__", None)
    return code is not None and code.co_filename == nn.Module._call_impl.__code__.co_filename


def plain_call(original: Any) -> str:
    """Give the expression that runs a module as if hookd were not there, in terms of self, args and kwargs."""
    if not is_pristine(original):
        return "original(self, *args, **kwargs)"
    if not HAS_COMPILED_IMPL:
        return "self._call_impl(*args, **kwargs)"
    # Source: torch/nn/modules/module.py `_wrapped_call_impl`, 2.1 to 2.14.
    return ("(self._call_impl(*args, **kwargs) if self._compiled_call_impl is None"
            " else self._compiled_call_impl(*args, **kwargs))")  # fmt: skip


CALL_SOURCE = """
def __call__(self, *args, **kwargs):
    plan = get(id(self))
    if plan is SKIP or is_dynamo_compiling():
        return CALL
    if plan is None:
        return missing(self, args, kwargs)
    return plan(self, args, kwargs)
"""
# Globals, not a closure: where dynamo inlines this, it guards on what the names stand for. Globals it finds through
# their dict, a closure through `Module.__call__`, so that each attach and detach would be a recompile.


def make_call(plans: dict[int, Any], missing: Callable[..., Any], original: Any) -> Any:
    """Make the `__call__` that looks up a module's plan.

    It outlives a detach where something keeps a bound copy (an OptimizedModule does): then `plans` is empty and
    `missing` calls through.
    """
    namespace: dict[str, Any] = {
        "get": plans.get, "missing": missing, "original": original, "is_dynamo_compiling": is_dynamo_compiling,
        "SKIP": SKIP,
    }  # fmt: skip
    exec(compile(CALL_SOURCE.replace("CALL", plain_call(original)), "<hookd call>", "exec"), namespace)
    call = namespace["__call__"]
    functools.update_wrapper(call, original)
    del call.__wrapped__
    skip_frames(call.__code__)
    return call


def skip_frames(code: CodeType) -> None:
    """Tell dynamo never to compile frames of this code; needs no import of dynamo, and survives its reset."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.set_code_exec_strategy(code, strategy)
    elif hasattr(frames, "skip_code"):
        frames.skip_code(code)


def no_frame() -> Callable[[Any], Any]:
    """Give the function that switches dynamo's frame evaluation and returns what was set before."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    return getattr(frames, "set_eval_frame", lambda previous: previous)


def is_in_flight() -> bool:
    """Whether this thread is inside a module's call: one that was under way when we arrived, or an unnamed one."""
    codes = {nn.Module._call_impl.__code__}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


class ClassPatch:
    """`nn.Module.__call__` replaced by ours, and put back by identity."""

    def __init__(self, plans: dict[int, Any], missing: Callable[..., Any]) -> None:
        self.original: Any = nn.Module.__dict__["__call__"]
        self.ours = make_call(plans, missing, self.original)

    def install(self) -> None:
        """Put ours in place."""
        nn.Module.__call__ = self.ours  # type: ignore[method-assign]
        self.register()

    def register(self) -> None:
        """Tell dynamo, if it is loaded, that ours is the unpatched `__call__`. Called again as dynamo may load later."""
        for name in _DYNAMO:
            module = sys.modules.get(name)
            known = getattr(module, "unpatched_nn_module_call", None)
            if known is self.original:
                module.unpatched_nn_module_call = self.ours  # type: ignore[union-attr]

    def restore(self) -> bool:
        """Put the original back.

        Returns:
            False where somebody has patched on top of us: ours then stays as a bare pass-through.
        """
        for name in _DYNAMO:
            module = sys.modules.get(name)
            if getattr(module, "unpatched_nn_module_call", None) is self.ours:
                module.unpatched_nn_module_call = self.original  # type: ignore[union-attr]
        if nn.Module.__dict__["__call__"] is not self.ours:
            return nn.Module.__dict__["__call__"] is self.original
        nn.Module.__call__ = self.original  # type: ignore[method-assign]
        return True


class Replaced:
    """One function of a module or class replaced by a wrapper, and put back by identity."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self.owner, self.name = owner, name
        self.original = owner.__dict__[name]
        ours: Any = wrap(self.original)
        self.ours = functools.update_wrapper(ours, self.original)
        del self.ours.__wrapped__
        skip_frames(ours.__code__)
        setattr(owner, name, self.ours)

    def restore(self) -> bool:
        """Put the original back; False where somebody has replaced ours in the meantime."""
        if self.owner.__dict__.get(self.name) is not self.ours:
            return False
        setattr(self.owner, self.name, self.original)
        return True
