"""Detection of hooks that block the training for seconds within one step. Runs in hookd's own thread.

The governor decides at step boundaries, and meters at most one step in five. A plugin that takes half a second in each call of
hundreds of modules would go on for many minutes before it decides. So hookd's own thread samples, a few times a second, which
threads are inside a plugin: it reads a flag, and walks the stacks only if a flag is set. The training pays nothing for it.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, Any

from hookd.target.entry.threads import is_ours, living_threads
from hookd.target.events.dispatch import Dispatch
from hookd.target.events.phases import PHASE
from hookd.target.plugins.faults import Failure
from hookd.target.plugins.governor import limit_of
from hookd.target.plugins.host import PAUSED
from hookd.target.plugins.listeners import Listener
from hookd.wire.frames import innermost_frames
from hookd.wire.originals import clock
from hookd.wire.plugin_frames import line_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.governor import Governor
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.wire.page import PageWriter

    Running = tuple[Loaded, Listener, str]

DELIVER = Dispatch.deliver.__code__
"""Calls a plugin back with the numbers that it requested (`Context.later`, `Context.summary`)."""
POLL_S = 0.25
POLLS = 8
"""Number of polls within one step, consecutive or not, that must find a plugin running: about two seconds."""
MOST_POLLS = 40
"""Number of polls that are remembered: a process that takes no steps is judged by the last ten seconds."""


class SlowHooks:
    """Samples which plugins are running, and stops those that take too long.

    Args:
        states: the threads that call modules, by ident.
        turned: called after switches were turned.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        states: dict[int, ThreadState],
        page: PageWriter,
        registry: Registry,
        governor: Governor,
        turned: Callable[[], None],
        errors: Errors,
        count: StepCount,
    ) -> None:
        self._states, self._page, self._cells = states, page, page.cells
        self._registry, self._governor, self._turned = registry, governor, turned
        self._errors, self._count = errors, count
        self._polled = 0.0
        self._step = -1
        self._polls: deque[set[int]] = deque(maxlen=MOST_POLLS)
        self._reported: set[int] = set()  # plugins logged once

    def poll(self) -> None:
        """Check the running hooks, if `POLL_S` have passed since the last poll."""
        now = clock.monotonic()
        if now - self._polled < POLL_S:
            return
        self._polled = now
        if self._count.done != self._step:
            self._step = self._count.done
            self._polls.clear()
        try:
            running = self._running() if any(map(self._is_busy, list(self._states.values()))) else []
            self._polls.append({loaded.number for loaded, _, _ in running})
            for loaded, listener, where in running:
                self._judge(loaded, listener, where)
        except Failure as failure:
            self._errors.own_failure("the check of slow hooks", failure)

    def _running(self) -> list[Running]:
        """Return the plugins whose hooks are running, with the current line in the plugin's source."""
        hooks = self._hooks()
        with innermost_frames() as frames:
            self._forget_gone(self._states.keys() - frames.keys())
            busy = [ident for ident, state in list(self._states.items()) if self._is_busy(state)]
            running = [_hook(frames.get(ident), hooks) for ident in busy]
        return [hook for hook in running if hook is not None]

    def _forget_gone(self, idents: set[int]) -> None:
        """Forget those of these threads that have ended; the others run no Python now, like autograd's between backward passes."""
        if not idents:
            return
        with contextlib.suppress(OSError):  # in a container without /proc they stay
            alive = living_threads()
            for ident in idents:
                state = self._states.get(ident)
                if state is not None and state.native not in alive:
                    self._states.pop(ident, None)

    def _is_busy(self, state: ThreadState) -> bool:
        """Whether a thread is inside a plugin that has not paused the training on purpose (`Context.pause`)."""
        return state.busy and self._cells[state.beat + PHASE] != PAUSED

    def _hooks(self) -> dict[CodeType, list[tuple[Loaded, Listener]]]:
        hooks: dict[CodeType, list[tuple[Loaded, Listener]]] = {}
        for loaded in self._registry:
            for listener in loaded.listeners:
                code = getattr(getattr(listener.call, "__func__", listener.call), "__code__", None)
                if code is not None:
                    hooks.setdefault(code, []).append((loaded, listener))
        return hooks

    def _judge(self, loaded: Loaded, listener: Listener, where: str) -> None:
        times = sum(loaded.number in poll for poll in self._polls)
        share = times / len(self._polls)
        if times < POLLS or share < limit_of(loaded) or loaded.state != "active":
            return
        self._polls.clear()
        why = f"{listener.hook} blocked training for {times * POLL_S:.2g} s within one step"
        at = f": it is at {where}" if where else ""
        if loaded.is_sampled(listener) and self._put_off(loaded, share):
            now = f"is called once in {loaded.interval} steps now"
            self._page.log("info", f"plugin {loaded.name}: {why}, and {now}{at}")
        elif not (loaded.plugin.mutates or loaded.context.requests.is_fixed):
            self._errors.late(loaded, listener.hook, why + at, where)
        elif loaded.number not in self._reported:  # the person accepted its cost: only log
            self._reported.add(loaded.number)
            self._page.log("info", f"plugin {loaded.name}: {why}{at}")

    def _put_off(self, loaded: Loaded, share: float) -> bool:
        """Stretch the interval as far as the budget demands, and end the plugin's samples in this step; False if impossible."""
        budget = self._governor.budget
        times = max(2, math.ceil(share / budget)) if budget > 0 else 2
        if not self._governor.stretch(loaded, times):
            return False
        for listener in loaded.listeners:
            if loaded.is_sampled(listener) and loaded.context.requests.interval(listener.hook) is None:
                listener.is_on = False
        self._turned()
        return True


def _hook(frame: Any, hooks: dict[CodeType, list[tuple[Loaded, Listener]]]) -> Running | None:
    """Return the hook that a thread is in: a plugin's function that hookd has called; for a callback it is named "later"."""
    innermost = frame
    while frame is not None:
        if frame.f_code is DELIVER and (loaded := frame.f_locals.get("loaded")) is not None:
            listener = Listener(loaded.number, "later", ("numbers",), mutates=False, remembers=False, call=DELIVER)
            return loaded, listener, line_at(innermost, loaded.plugin)
        known = hooks.get(frame.f_code)
        if known is not None and frame.f_back is not None and is_ours(frame.f_back.f_code.co_filename):
            loaded, listener = known[0] if len(known) == 1 else _whose(frame, known)
            return loaded, listener, line_at(innermost, loaded.plugin)
        frame = frame.f_back
    return None


def _whose(frame: Any, known: list[tuple[Loaded, Listener]]) -> tuple[Loaded, Listener]:
    """Return the plugin that the frame belongs to, of several that share its function, such as a class and its subclass."""
    plugin = frame.f_locals.get(frame.f_code.co_varnames[0])
    return next(((loaded, listener) for loaded, listener in known if loaded.plugin is plugin), known[0])
