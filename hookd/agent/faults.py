"""Whose exception is it: the plugin's, or the training code's? Runs in the target.

An exception that leaves a plugin is the plugin's, with one exception: Python runs the user's signal handlers between
any two instructions of the main thread, also of a plugin's. What such a handler raises (a preemption, a timeout)
belongs to the training code; a guard that swallowed it would lose 1.5-4 % of all preemption signals.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType, TracebackType

Failure = (Exception, SystemExit)
"""What a guard catches; KeyboardInterrupt and the like are never a plugin's."""


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether `error` was raised in a signal handler of the user, so that it must be passed on untouched.

    Only the main thread runs signal handlers (Python's `signal` module), so elsewhere the answer is no.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return False
    handlers = _handler_codes()
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code in handlers:
            return True
        frame = frame.tb_next
    return False


def _handler_codes() -> set[CodeType]:
    codes = (_code(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in codes if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__") and callable(handler) and not isinstance(handler, type):
        function = type(handler).__dict__.get("__call__")
    return getattr(function, "__code__", None)
