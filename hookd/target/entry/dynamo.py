"""Keeps torch.compile from noticing hookd.

Dynamo meets hookd's code in two ways. It *evaluates* every frame that is entered under its callback; so all code of the agent is
marked to be skipped. And it *inlines* functions that a compiled frame calls; so each function of hookd's that replaces one of
torch's has an attribute `_torchdynamo_inline` with torch's own function, which dynamo inlines instead
(torch/_dynamo/variables/functions.py `UserFunctionVariable.__init__`, 2.1 to 2.14). Its guards then depend on nothing of hookd's.
"""

from __future__ import annotations

import sys
import weakref
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CALL_MODULES = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
_SKIPPED: weakref.WeakSet[ModuleType] = weakref.WeakSet()
_WITHOUT_CODE = frozenset(
    {BuiltinFunctionType, ModuleType, type(None), bool, bytes, dict, float, frozenset, int, list, set, str, tuple}
)
_FRAMES: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


is_dynamo_compiling = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", lambda: False)


def stand_in(ours: Any, original: Any) -> None:
    """Make dynamo inline `original` instead of `ours`, and evaluate no frame of `ours`."""
    ours._torchdynamo_inline = original
    skip_frames(ours.__code__)


def skip_frames(code: CodeType) -> None:
    """Exclude frames of this code from compilation by dynamo. This does not import dynamo, and survives its reset."""
    if hasattr(_FRAMES, "set_code_exec_strategy"):
        action = _FRAMES._FrameAction
        strategy = _FRAMES._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _FRAMES.set_code_exec_strategy(code, strategy)
    elif hasattr(_FRAMES, "skip_code"):
        _FRAMES.skip_code(code)


def skip_package(package: str, rest: Callable[[], None]) -> None:
    """Exclude a package's loaded functions from compilation: 5 ms the first time, with a `rest` after each module."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package + ".") and module not in _SKIPPED and module is not None:
            for code in _codes(vars(module), name):
                skip_frames(code)
            _SKIPPED.add(module)
            rest()


def _codes(namespace: Any, module: str) -> Iterator[CodeType]:
    """Yield the code of all functions of a module and its classes. Nested functions are included."""
    for value in list(namespace.values()):
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(vars(value), module)
            continue
        if type(value) in _WITHOUT_CODE:  # most values, for which five failing look-ups are slow
            continue
        for function in (value, *(getattr(value, name, None) for name in ("__func__", "__wrapped__", "fget", "func"))):
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _with_inner(const)


def no_frame() -> Callable[[Any], Any]:
    """Return the function that sets dynamo's frame evaluation and returns the previous setting."""
    return getattr(_FRAMES, "set_eval_frame", lambda previous: previous)


def is_autograd_compiled() -> bool:
    """Whether backward passes are compiled.

    Hooks on the graph then become part of the compiled code. Source: torch/_dynamo/compiled_autograd.py and
    torch/_dynamo/config.py, 2.4 to 2.14.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "compiled_autograd_enabled", False):
        return True
    config = sys.modules.get("torch._dynamo.config")
    return bool(getattr(config, "compiled_autograd", False))


def replace_call(old: Any, new: Any) -> None:
    """Replace the function that dynamo takes for the unpatched `nn.Module.__call__`.

    If dynamo is loaded, it takes `new` for this function instead of `old`. With that function, dynamo calls `forward`
    directly if a module has no hooks: torch/_dynamo/variables/nn_module.py `UnspecializedNNModuleVariable.call_function`,
    2.1 to 2.14.
    """
    for name in _CALL_MODULES:
        module: Any = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is old:
            module.unpatched_nn_module_call = new
