"""The state of torch while a plugin looks at tensors.

An observer's tensor operations must leave no trace:
- in the autograd graph: they run under no_grad;
- in a dispatch mode: under selective activation checkpointing, an operation that runs only in the first pass gives silently
  wrong gradients;
- in a function mode or the `__torch_function__` of a tensor's class, which see even the reading of an attribute;
- in autocast's cache of cast weights: a weight cast under no_grad and cached would lose its gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hookd.api.events import Returned
from hookd.api.nested import tensors, versions
from hookd.api.refs import passing_ref
from hookd.target.plugins.faults import Failure, is_from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.events import Module
    from hookd.target.entry.threads import ThreadState

REMEMBERED = 20_000
"""Number of calls that are remembered within one outermost call."""
INPUTS = 8

_C = torch._C
_Tensor = torch.Tensor
_version: Any = _Tensor._version.__get__  # type: ignore[attr-defined]  # bypasses a subclass's override
unseen: Any = _C.DisableTorchFunction
"""A context manager that hides accesses to tensors from function modes and tensor subclasses."""
_new = tuple.__new__  # a NamedTuple's own constructor takes three times as long
tracing = _C._get_tracing_state
_no_count = int  # int() is 0: stands in for a counter that this version of torch lacks
_dispatch_modes = getattr(_C, "_len_torch_dispatch_stack", _no_count)
function_modes = getattr(_C, "_len_torch_function_stack", _no_count)
_autocast = getattr(_C, "_is_any_autocast_enabled", bool)
_functorch = getattr(getattr(_C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_compiler = getattr(torch, "compiler", torch)
_cuda_is_initialized: Any = torch.cuda.is_initialized
_UNREAL = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode", "PreDispatchTorchFunctionMode")


is_grad_enabled = torch.is_grad_enabled
set_grad_enabled = _C._set_grad_enabled
"""The caller must save and restore the grad mode in its own frame, with try and finally: a signal handler of the user may
raise after any call, even before a function of this module has returned, and the mode must not stay off."""


def versions_of(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return `hookd.versions` of a call's inputs; an empty tuple if that fails."""
    try:
        if len(inputs) == 1 and not kwargs and type(inputs[0]) is _Tensor and not function_modes():
            return (inputs[0]._version,)
        with unseen():
            return versions(inputs, kwargs)
    except Failure as failure:
        if is_from_signal_handler(failure):
            raise
        return ()


def remember(thread: ThreadState, module: Module, args: tuple[Any, ...], output: Any) -> None:
    """Record a call's outputs, in the order of returning; this keeps no tensor alive and lets no error out."""
    returned, passing = thread.returned, thread.passing
    if len(returned) >= REMEMBERED:
        return
    try:
        with unseen():
            # The inputs of a device's outputs are not used: reading them would wait for the device.
            is_away = type(output) is _Tensor and not output.is_cpu
            inputs = () if is_away else tuple([passing_ref(x, passing) for x in args[:INPUTS] if type(x) is _Tensor])
            outputs = tensors(output)
            returned += [_new(Returned, (module, passing_ref(x, passing), _version(x), inputs, False)) for x in outputs]
    except Failure as failure:  # an inference tensor has no version
        if is_from_signal_handler(failure):
            raise


def ask(_undo: list[Any]) -> bool:
    """Return False, in place of `quiet` while calls are not entered in C: Python has to check."""
    return False


quiet: Callable[[list[Any]], bool] = ask
"""Does the work of `enter` in C if no mode is active and nothing else is unusual; else returns False."""
USUAL = (
    _dispatch_modes, _functorch, _autocast, getattr(_C, "_cuda_isCurrentStreamCapturing", None), _compiler, torch.cuda,
)  # fmt: skip
"""The objects by which `hookd/native/tensors.c` checks that."""


def enter(undo: list[Any]) -> bool:
    """Disable modes and autocast in this thread, if tensors may be looked at now.

    Args:
        undo: receives the guards for `leave`, even if a signal handler raises before this has returned.

    Returns:
        Whether tensors may be looked at: not while tracing, exporting, under vmap, with fake tensors or during the capture of
        a CUDA graph.
    """
    if quiet(undo):
        return True
    if is_unreal():
        return False
    # This also disables a tensor subclass's `__torch_function__`, which is the training's code.
    _enter(undo, unseen())
    if _dispatch_modes():
        _enter(undo, _C._DisableTorchDispatch())
    if _autocast():
        undo.append(_AutocastOff())
    return True


def leave_in_python(undo: list[Any]) -> None:
    """Undo `enter`, in place of `leave` while calls are not entered in C."""
    while undo:
        try:
            undo[-1].__exit__(None, None, None)
        finally:
            undo.pop()


leave: Callable[[list[Any]], None] = leave_in_python
"""Undoes `enter`."""


def _enter(undo: list[Any], guard: Any) -> None:
    undo.append(guard)
    guard.__enter__()


def is_unreal() -> bool:
    """Whether the current code is not training: it is a trace, an export, vmap, fake tensors or a CUDA graph's capture."""
    return (
        tracing() is not None
        or getattr(_compiler, "_is_compiling_flag", False)
        or _functorch() is not None
        or (_dispatch_modes() > 0 and _is_fake())
        or is_capturing()
    )


def _is_fake() -> bool:
    for at in range(_dispatch_modes()):
        if type(_C._get_dispatch_stack_at(at)).__name__ in _UNREAL:
            return True
    key = getattr(_C, "_TorchDispatchModeKey", None)
    return key is not None and any(_C._get_dispatch_mode(k) is not None for k in (key.FAKE, key.PROXY))


def is_capturing() -> bool:
    """Whether the calling thread's stream is being captured in a CUDA graph."""
    # is_initialized() reads a Python flag; a query before CUDA is initialized would initialize it.
    return bool(_cuda_is_initialized()) and torch.cuda.is_current_stream_capturing()


class _AutocastOff:
    """Disables autocast for all devices on which it is enabled (torch 2.4+ has one function for all of them)."""

    def __init__(self) -> None:
        self.devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        for device in self.devices:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        while self.devices:
            torch.set_autocast_enabled(self.devices[-1], True)
            self.devices.pop()

    def __del__(self) -> None:
        self.__exit__()
