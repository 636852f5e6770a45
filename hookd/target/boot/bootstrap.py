"""Start and stop of this process's agent."""

from __future__ import annotations

import posix
import sys
from typing import TYPE_CHECKING, Any

from hookd.errors import AttachError, ControlError, TargetUnsupported
from hookd.target.boot import foundation
from hookd.target.boot import loader as agent_lock
from hookd.wire.originals import Lock, clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.wire.agent import AgentConfig, Detached

_lock = Lock()
_agent: Any = None


def start(config: AgentConfig, loader: Any = None, clock: Callable[[], int] = clock.perf_counter_ns) -> None:
    """Create the page, load the plugins, patch torch, listen.

    Args:
        config: method, plugins, lease_s, budget, run, rank (see `AgentConfig`).
        loader: the loader that imported this code, if it came in a payload; it imports plugins and cleans up at the end.
        clock: returns the time in ns; measures steps and the time of plugins.

    Raises:
        HookdError: an agent runs already, torch is not imported, the page cannot be created, or a plugin cannot be loaded.
            Nothing is left behind.
    """
    global _agent
    with _lock:
        if loader is not None:  # it has already acquired this process
            _agent = _begin(config, loader, clock)
            return
        try:
            agent_lock.acquire()
        except agent_lock.RefusalError as exc:
            raise AttachError(str(exc), reason=exc.reason, hint="" if _agent is not None else _hint()) from None
        try:
            _agent = _begin(config, None, clock)
        except BaseException:
            agent_lock.release()
            raise


def _begin(config: AgentConfig, loader: Any, clock: Callable[[], int]) -> Any:
    if "t" in getattr(sys, "abiflags", ""):
        hint = "hookd counts under the interpreter's lock; use the ordinary build of the same version."
        raise TargetUnsupported("this is a free-threaded build of Python", reason="free-threaded", hint=hint)
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(getattr(torch, "nn", None), "Module"):
        raise TargetUnsupported("torch is not imported in this process", reason="no-torch")
    foundation.require(torch)
    # Imported only now, because it imports torch. It also imports everything that will be needed later, because the payload
    # may be gone then.
    from hookd.target.boot.lifecycle import Agent  # noqa: PLC0415

    agent = Agent(config, loader, _left, clock)
    try:
        agent.begin()
    except BaseException:
        agent.leave()
        raise
    return agent


def _left() -> None:
    global _agent
    _agent = None


def attached() -> float | None:
    """Return the time of the attach in unix seconds. It identifies this process's agent; None without an agent."""
    agent = _agent
    return None if agent is None else float(agent.attached)


def page() -> int:
    """Open the page of this process again, for its own code.

    The caller closes the descriptor.

    Raises:
        ControlError: reason "not-attached", or "already-attached" if the agent belongs to another copy of hookd.
    """
    agent = _agent
    try:
        return int(agent.page())
    except (AttributeError, OSError):  # no agent, or it has just closed its page
        raise _not_ours() from None


def _not_ours() -> ControlError:
    if agent_lock.is_acquired():
        return ControlError("hookd was brought into this process from outside", reason="already-attached", hint=_hint())
    return ControlError("no agent runs in this process", reason="not-attached")


def _hint() -> str:
    pid = posix.getpid()
    return f"`hookd report {pid}` in a terminal shows what the agent from outside sees; `hookd detach {pid}` ends it."


def orphan() -> None:
    """Limit the agent's stay, because the tool that attached it died before it saw the answer."""
    agent = _agent
    if agent is not None:
        agent.orphan()


def stop(timeout_s: float = 10.0) -> Detached:
    """Detach the agent of this process.

    If this is called inside a module's call, the agent is gone when that call has returned.

    Returns:
        `restored` and `residue`, as in the control socket's answer to `detach`.

    Raises:
        ControlError: as for `page`.
    """
    agent = _agent
    if agent is None:
        raise _not_ours()
    result: Detached = agent.detach(timeout_s)
    agent.leave_outside()
    return result
