"""What a process says of its end: the exception for which the interpreter ends. Runs in the target.

Nothing is installed for it. CPython puts an exception that nobody has caught into `sys.last_value`, and since 3.12 into
`sys.last_exc` too, before it calls `sys.excepthook` and long before atexit (Python/pythonrun.c `_PyErr_PrintEx`, 3.10 to
3.14). That of `sys.exit` it does not put there: which code it was given is for the kernel to tell.
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
"""What runs in every call of a module, whoever has called it (torch 2.0 to 2.14)."""
MAX_MESSAGE = 1000
MAX_WHERE = 200


def printed() -> int:
    """Name the exception that Python has printed last, 0 for none."""
    found = _last()
    return 0 if found is None else id(found)


def last_words(before: int, name_of: Callable[[Any], str]) -> dict[str, str] | None:
    """Tell of the exception that Python has printed last, None if there is none, or it is the one named `before`.

    Args:
        before: what `printed` has named.
        name_of: returns the name of a known module, and "" for any other.

    Returns:
        `type`; `message`; `where` in the code it was raised; `module`, the innermost one whose call it has left.
    """
    error = _last()
    if error is None or id(error) == before:
        return None
    kind = type(error)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    told = {"type": clean(home + kind.__qualname__, MAX_WHERE), "message": clean(str(error), MAX_MESSAGE)}
    where, module = _trace(error.__traceback__, name_of)
    return {**told, "where": clean(where, MAX_WHERE), "module": clean(module, MAX_WHERE)}


def _last() -> BaseException | None:
    found: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found if isinstance(found, BaseException) else None


def _trace(traceback: TracebackType | None, name_of: Callable[[Any], str]) -> tuple[str, str]:
    """Give where an exception was raised, and the name of the innermost module that it came through."""
    where = module = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is _CALL:
            module = name_of(traceback.tb_frame.f_locals.get("self")) or module
        if code.co_filename != FILE:
            where = f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return where, module
