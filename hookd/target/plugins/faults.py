"""Attribution of exceptions: to the plugin, or to the training code.

An exception that leaves a plugin belongs to the plugin, except one from a signal handler: Python runs the user's signal
handlers between any two instructions of the main thread, a plugin's included. The exception of such a handler (a
preemption, a timeout) belongs to the training code; a guard that swallowed it would lose 1.5-4 % of all preemption signals.

Python's own handler of Ctrl-C is written in C and leaves no frame. So a KeyboardInterrupt belongs to the training unless a
`raise` statement raised it. CancelledError, GeneratorExit and SystemExit reach a function only through its own actions, so
in a plugin they are its errors. An exception of another class that is thrown into a thread (PyThreadState_SetAsyncExc)
cannot be distinguished from a plugin's own.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the part of `signal` that is in C
import contextlib
import dis
import functools
import sys
from typing import TYPE_CHECKING, Any

from hookd.target.boot.loader import public
from hookd.wire.originals import thread

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from hookd.errors import TrainingError

Failure = (Exception, SystemExit)
"""Exceptions that a guard around hookd's own code catches. A guard around a plugin catches all, and `Errors.fault` decides."""
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether `error` was raised in a signal handler, and must propagate unchanged.

    Only the main thread runs signal handlers (Python's `signal` module). In other threads this is False, except for a
    KeyboardInterrupt that was thrown into the thread.
    """
    if isinstance(error, KeyboardInterrupt) and not _is_raised(error):
        return True
    if not thread.is_main():
        return False
    handlers = _handler_codes()
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code in handlers:
            return True
        frame = frame.tb_next
    return False


def for_program(error: TrainingError) -> TrainingError:
    """Return `error` with a class that the program's own `except hookd.TrainingError` catches.

    The hookd in the payload has its own classes, distinct from those of a hookd that the program has imported.
    """
    theirs, kind = getattr(sys.modules.get("hookd.errors"), "TrainingError", None), type(error)
    if theirs is None or not isinstance(error, theirs):
        bases = (kind,) if theirs is None else (kind, theirs)
        with contextlib.suppress(TypeError):  # a class with a metaclass or a layout that does not allow it
            error.__class__ = type(kind.__name__, bases, {"__module__": public(kind.__module__)})
    return error


def _is_raised(error: BaseException) -> bool:
    """Whether a `raise` statement raised an exception: it is the last instruction of the traceback's innermost frame.

    Raising the exception again does not change the innermost frame (Python/ceval.c `exception_unwind`, 3.9 to 3.14).
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def _handler_codes() -> set[CodeType]:
    codes = (_code(_signal.getsignal(number)) for number in _signal.valid_signals())
    return {code for code in codes if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__") and callable(handler) and not isinstance(handler, type):
        function = type(handler).__dict__.get("__call__")
    return getattr(function, "__code__", None)
