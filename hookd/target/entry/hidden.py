"""Hides hookd's own functions from a profile of the training.

cProfile, `torch.profiler.profile(with_stack=True)` and other users of `sys.setprofile` would show more of hookd than of a small
model. So while a profiler listens to a thread, hookd's code there runs as the profiler's own calls do: between
`PyThreadState_EnterTracing` and `PyThreadState_LeaveTracing` (CPython 3.11 and newer). Code of the training that is called from
there stays visible. While no profiler listens, nothing is hidden, and a debugger stops in a plugin as usual.

Only `hookd/native/calls.c` calls these two. No signal handler and no function of a debugger may run between them, and no Python
function may begin hidden and continue visible (CPython 3.15 crashes if an exception passes through such a function).
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from hookd.target.entry.dynamo import is_dynamo_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.boot.arming import Life

profile: Callable[[], object] = sys.getprofile
"""Returns None if no profiler listens to the calling thread's calls."""
_monitoring: Any = getattr(sys, "monitoring", None)
tool: Callable[[], object] = profile if _monitoring is None else partial(_monitoring.get_tool, _monitoring.PROFILER_ID)
"""Returns None if no profiler listens to all threads, as cProfile does from CPython 3.12 on."""


class Callbacks:
    """Makes the functions through which the training calls hookd.

    They are hidden from a profiler while the agent observes.

    Args:
        life: the agent's life; once it has ended, nothing is hidden.

    Attributes:
        hidden: calls a function hidden from a profiler; None where calls are not entered in C.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self.hidden: Callable[..., Any] | None = None

    def callback(self, act: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return the function that the training calls to run `act`.

        All functions that this returns share one code object.

        Args:
            act: called with the call's arguments.
            plain: called instead while dynamo compiles; if None, the function then does nothing.
        """
        life = self._life

        def hookd(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return None if plain is None else plain(*args, **kwargs)
            hidden = self.hidden
            if hidden is None or not life.is_live or (profile() is None and tool() is None):
                return act(*args, **kwargs)
            return hidden(act, args, kwargs)

        return hookd


def hooked(library: Any) -> Callable[..., Any]:
    """Return the function that the training calls to run a hook of `hookd/native/graph.c`; it hides itself from a profiler."""
    made = library["hookd_entry_graph"]
    made.argtypes, made.restype = (), ctypes.py_object
    run = made()

    def hookd(hook: Any, *grads: Any) -> Any:
        return None if is_dynamo_compiling() else run(hook, grads)

    return hookd
