"""The state of torch while a plugin looks at tensors. Runs in the target.

An observer's tensor operations must leave no trace: not in the autograd graph (no_grad), not in a dispatch mode
(under selective activation checkpointing an operation that runs in the first pass alone gives silently wrong
gradients), not in a function mode or the `__torch_function__` of a tensor's class, where already the reading of an
attribute shows, and not in autocast's cache of cast weights (a weight cast under no_grad and cached would lose its
gradient).
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
"""So many calls are remembered of one outermost call."""
INPUTS = 8

_C = torch._C
_Tensor = torch.Tensor
_version: Any = _Tensor._version.__get__  # type: ignore[attr-defined]  # past what a class of tensors has in its place
unseen: Any = _C.DisableTorchFunction
"""A context manager: no function mode and no tensor's class is told of what is asked of tensors inside."""
_new = tuple.__new__  # a NamedTuple's own constructor takes three times as long
tracing = _C._get_tracing_state
_no_count = int  # int() is 0: stands in for a counter that this torch does not have
_dispatch_modes = getattr(_C, "_len_torch_dispatch_stack", _no_count)
function_modes = getattr(_C, "_len_torch_function_stack", _no_count)
_autocast = getattr(_C, "_is_any_autocast_enabled", bool)
_functorch = getattr(getattr(_C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_compiler = getattr(torch, "compiler", torch)
_cuda_is_initialized: Any = torch.cuda.is_initialized
_UNREAL = ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode", "PreDispatchTorchFunctionMode")


is_grad_enabled = torch.is_grad_enabled
set_grad_enabled = _C._set_grad_enabled
"""For the caller, who must save and restore the grad mode in its own frame, in try and finally: a signal handler of the
user may raise after any call, also before this module's functions have returned, and the mode must not stay off."""


def versions_of(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return `hookd.versions` of a call's inputs, or nothing where asking fails."""
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
    """Note what a call has returned, in the order of returning; nothing is kept alive, and nothing of it can fail."""
    returned, passing = thread.returned, thread.passing
    if len(returned) >= REMEMBERED:
        return
    try:
        with unseen():
            # On a device nobody looks at what an output was made of: it would have to wait for it.
            is_away = type(output) is _Tensor and not output.is_cpu
            inputs = () if is_away else tuple([passing_ref(x, passing) for x in args[:INPUTS] if type(x) is _Tensor])
            found = tensors(output)
            returned += [_new(Returned, (module, passing_ref(x, passing), _version(x), inputs, False)) for x in found]
    except Failure as failure:  # an inference tensor has no version
        if is_from_signal_handler(failure):
            raise


def ask(_undo: list[Any]) -> bool:
    """Say that Python has to look, in the place of `quiet`: calls are not entered in C."""
    return False


quiet: Callable[[list[Any]], bool] = ask
"""Does what `enter` does where all is usual, in C; or says that it is not."""
USUAL = (
    _dispatch_modes, _functorch, _autocast, getattr(_C, "_cuda_isCurrentStreamCapturing", None), _compiler, torch.cuda,
)  # fmt: skip
"""By what `hookd/native/tensors.c` sees that it is."""


def enter(undo: list[Any]) -> bool:
    """Take modes and autocast away from this thread, or say that tensors must not be looked at now.

    Args:
        undo: gets what `leave` needs, also where a signal handler raises before this has returned.

    Returns:
        Whether they may be looked at: not while tracing, exporting, under vmap, with fake tensors or in a CUDA graph's capture.
    """
    if quiet(undo):
        return True
    if is_unreal():
        return False
    # Of a tensor's subclass as well: what it makes of a function of torch is the training's code.
    _enter(undo, unseen())
    if _dispatch_modes():
        _enter(undo, _C._DisableTorchDispatch())
    if _autocast():
        undo.append(_AutocastOff())
    return True


def leave_in_python(undo: list[Any]) -> None:
    """Undo `enter`, in the place of `leave`: calls are not entered in C."""
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
    """Whether what runs now is no training: a trace, an export, vmap, fake tensors, the capture of a CUDA graph."""
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
    """Tell whether the calling thread's stream is being captured in a CUDA graph."""
    # is_initialized() is a flag of Python's; asking CUDA before it is initialised would initialise it.
    return bool(_cuda_is_initialized()) and torch.cuda.is_current_stream_capturing()


class _AutocastOff:
    """Autocast switched off for all devices on which it is on (torch 2.4+ has one function for all of them)."""

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
