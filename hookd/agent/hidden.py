"""How hookd keeps its own functions out of a profile of the training. Runs in the target.

cProfile, `torch.profiler.profile(with_stack=True)` and whatever else `sys.setprofile` tells of calls would show more of hookd than
of a small model. So while a profiler listens to a thread, what hookd does there is done as the interpreter does what the profiler
itself calls: between `PyThreadState_EnterTracing` and `PyThreadState_LeaveTracing` (CPython 3.11 and newer). What of the training's
runs inside of that is seen. While no profiler listens nothing is hidden from anybody, and a debugger stops in a plugin as anywhere.

Who calls hookd sees to it: `hookd.agent.entrance`, `hookd/native/entry.c`, and each of hookd's own threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.agent.threads import ThreadState

profile: Callable[[], object] = sys.getprofile
"""Returns None where nobody listens to the calling thread's calls."""
_monitoring: Any = getattr(sys, "monitoring", None)
tool: Callable[[], object] = profile if _monitoring is None else partial(_monitoring.get_tool, _monitoring.PROFILER_ID)
"""Returns None where no profiler listens to all threads: so cProfile does, from CPython 3.12 on."""


def _of_interpreter(name: str, restype: Any, *argtypes: Any) -> Any:
    """Return a function of the interpreter's; None where it has none of this name."""
    try:
        found = ctypes.pythonapi[name]  # by index: an attribute is common to all users of ctypes
    except AttributeError:
        return None
    found.restype, found.argtypes = restype, argtypes
    return found


this_thread = _of_interpreter("PyThreadState_Get", ctypes.c_void_p)
begin = _of_interpreter("PyThreadState_EnterTracing", None, ctypes.c_void_p)
"""Hide what the thread whose state this is does from now on; None: nothing can be hidden. It nests."""
end = _of_interpreter("PyThreadState_LeaveTracing", None, ctypes.c_void_p)


def aloud(thread: ThreadState, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the training's, which is hidden from nobody."""
    if not thread.hidden:
        return function(*args, **kwargs)
    state = this_thread()
    try:
        end(state)
        thread.hidden = False
        return function(*args, **kwargs)
    finally:
        thread.hidden = True
        begin(state)


def call_aloud(thread: ThreadState, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module as if hookd were not there (torch/nn/modules/module.py `_wrapped_call_impl`, 2.1 to 2.14)."""
    compiled = module._compiled_call_impl
    return aloud(thread, module._call_impl if compiled is None else compiled, *args, **kwargs)


_HIDES_THREADS = begin is not None and _monitoring is not None


def hide_own() -> None:
    """Hide one of hookd's own threads, where a profiler may listen to all threads."""
    if _HIDES_THREADS:
        begin(this_thread())


@contextlib.contextmanager
def own_aloud() -> Iterator[None]:
    """Hide nothing that such a thread does for a plugin, so that a debugger stops there."""
    if not _HIDES_THREADS:
        yield
        return
    end(this_thread())
    try:
        yield
    finally:
        begin(this_thread())
