"""How hookd keeps its own functions out of a profile of the training. Runs in the target.

cProfile, `torch.profiler.profile(with_stack=True)` and whatever else `sys.setprofile` tells of calls would show more of hookd than
of a small model. So while a profiler listens to a thread, what hookd does there is done as the interpreter does what the profiler
itself calls: between `PyThreadState_EnterTracing` and `PyThreadState_LeaveTracing` (CPython 3.11 and newer). What of the training's
runs inside of that is seen. While no profiler listens nothing is hidden from anybody, and a debugger stops in a plugin as anywhere.

Both are called by `hookd/native/entry.c` alone: no signal handler and no function of a debugger's may come between them, and no
function of Python's may begin hidden and go on seen (CPython 3.15 crashes where an exception passes through that one).
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
"""Returns None where nobody listens to the calling thread's calls."""
_monitoring: Any = getattr(sys, "monitoring", None)
tool: Callable[[], object] = profile if _monitoring is None else partial(_monitoring.get_tool, _monitoring.PROFILER_ID)
"""Returns None where no profiler listens to all threads: so cProfile does, from CPython 3.12 on."""


class Entrances:
    """Makes the functions that the training calls in order to run hookd's: hidden from a profiler while the agent observes.

    Args:
        life: once it has ended, nothing is hidden, nor anything that is called.

    Attributes:
        hidden: calls a function hidden from a profiler; None where calls are not entered in C.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self.hidden: Callable[..., Any] | None = None

    def entrance(self, act: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return what the training calls in order to run `act`: all of these are one function.

        Args:
            act: gets the call's arguments.
            plain: is called in its place by what is being compiled; None: nothing is.
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
    """Return what the training calls in order to run a hook of `hookd/native/graph.c`, which hides itself from a profiler.

    Args:
        library: of the entry.
    """
    made = library["hookd_entry_graph"]
    made.argtypes, made.restype = (), ctypes.py_object
    run = made()

    def hookd(hook: Any, *grads: Any) -> Any:
        return None if is_dynamo_compiling() else run(hook, grads)

    return hookd
