"""What the training calls of hookd: all of it is one function. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.agent.dynamo import is_dynamo_compiling
from hookd.agent.hidden import begin, end, profile, this_thread, tool

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.agent.session import Session


def entrance(session: Session, act: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return what the training calls in order to run `act`, hidden from a profiler.

    Args:
        session: who ends it; what is called after that is hidden from nobody, nor is anything that it calls.
        act: gets the call's arguments.
        plain: is called in its place by what is being compiled; None: nothing is.
    """

    def hookd(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return None if plain is None else plain(*args, **kwargs)
        if begin is None or not session.is_live or (profile() is None and tool() is None):
            return act(*args, **kwargs)
        state = this_thread()
        try:  # a signal handler may raise after any call
            begin(state)
            thread = session.local.thread
            was_hidden, thread.hidden = thread.hidden, True
            try:
                return act(*args, **kwargs)
            finally:
                thread.hidden = was_hidden
        finally:
            end(state)

    return hookd
