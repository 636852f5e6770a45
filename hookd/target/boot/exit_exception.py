"""The uncaught exception with which the interpreter ends.

Nothing is installed for this. CPython puts an uncaught exception into `sys.last_value`, and since 3.12 also into `sys.last_exc`,
before it calls `sys.excepthook` and long before atexit (Python/pythonrun.c `_PyErr_PrintEx`, 3.10 to 3.14). It does not do so for
`sys.exit`, whose exit code is known to the kernel.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from hookd.target.entry.plan import FILE
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_CALL = nn.Module._call_impl.__code__
"""The code that runs in every call of a module, whatever has called it (torch 2.0 to 2.14)."""
MAX_MESSAGE = 1000
MAX_WHERE = 200


def last_exception_id() -> int:
    """Return the id of the exception that Python printed last, 0 for none."""
    error = _last()
    return 0 if error is None else id(error)


def exit_exception(before: int, name_of: Callable[[Any], str]) -> dict[str, str] | None:
    """Return a description of the exception that Python printed last; None if there is none, or if its id is `before`.

    `name_of` returns the name of a known module, and "" for any other.

    Returns:
        `type` and `message`; `where`, the line of code that raised it; `module`, the innermost module whose call it has left.
    """
    error = _last()
    if error is None or id(error) == before:
        return None
    kind = type(error)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    described = {"type": clean(home + kind.__qualname__, MAX_WHERE), "message": clean(str(error), MAX_MESSAGE)}
    where, module = _trace(error.__traceback__, name_of)
    return {**described, "where": clean(where, MAX_WHERE), "module": clean(module, MAX_WHERE)}


def _last() -> BaseException | None:
    error: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _trace(traceback: TracebackType | None, name_of: Callable[[Any], str]) -> tuple[str, str]:
    """Return where an exception was raised, and the innermost module whose call it has left."""
    where = module = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is _CALL:
            module = name_of(traceback.tb_frame.f_locals.get("self")) or module
        if code.co_filename != FILE:
            where = f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return where, module
