"""Hooks that keep the training waiting for seconds within one step. Runs in hookd's own thread.

The governor decides at steps' boundaries, by steps in which the time is taken: one in five. Of a plugin that takes half a second
at each call of hundreds of modules that is known after many minutes. So a few times a second it is looked which threads are
inside of a plugin just now: a flag, and the stacks only where it is set. The training pays nothing for it.
"""

from __future__ import annotations

import contextlib
import math
import posix
from collections import deque
from typing import TYPE_CHECKING, Any

from hookd.target.entry.threads import is_ours
from hookd.target.events.dispatch import Dispatch
from hookd.target.plugins.faults import Failure
from hookd.target.plugins.governor import DEAR_RATIO, RUNAWAY_RATIO
from hookd.target.plugins.listeners import Listener
from hookd.wire.frames import held
from hookd.wire.originals import clock
from hookd.wire.page import MODULE, PHASE, PHASES
from hookd.wire.plugin_frames import line_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.governor import Governor
    from hookd.target.plugins.listeners import Entry, Registry
    from hookd.target.plugins.plugin_errors import Errors
    from hookd.wire.page import PageWriter

    Found = tuple[Entry, Listener, str]

DELIVER = Dispatch.deliver.__code__
"""Calls a plugin back with numbers that it has asked for (`Context.later`, `Context.summary`)."""
LOOK_S = 0.25
LOOKS = 8
"""In so many looks of one step a plugin must have been found, in a row or not: in about two seconds of it."""
PAUSED = float(PHASES.index("paused"))
MOST_LOOKS = 40
"""So many are remembered: a process that takes no steps is judged by the last ten seconds."""


class Overdue:
    """Looks, and stops what takes too long.

    Args:
        states: of the threads that call modules, by their ident.
        turned: is called after switches were turned.
        count: of steps.
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
        self._looked = 0.0
        self._step = -1
        self._looks: deque[set[int]] = deque(maxlen=MOST_LOOKS)
        self._told: set[int] = set()

    def look(self) -> None:
        """Look once, if it is time."""
        now = clock.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._count.done != self._step:
            self._step = self._count.done
            self._looks.clear()
        try:
            found = self._found() if any(map(self._is_busy, list(self._states.values()))) else []
            self._looks.append({entry.number for entry, _, _ in found})
            for entry, one, where in found:
                self._judge(entry, one, where)
        except Failure as failure:
            self._errors.own_failure("a look at hooks that take long", failure)

    def _found(self) -> list[Found]:
        """Give the plugins whose hooks run just now, with the author's line."""
        hooks = self._hooks()
        with held() as frames:
            self._forget_gone(self._states.keys() - frames.keys())
            busy = [ident for ident, state in list(self._states.items()) if self._is_busy(state)]
            found = [_hook(frames.get(ident), hooks) for ident in busy]
        return [one for one in found if one is not None]

    def _forget_gone(self, idents: set[int]) -> None:
        """Forget those of these threads that have ended; others run no Python just now, as autograd's between backwards."""
        if not idents:
            return
        with contextlib.suppress(OSError):  # in a container without /proc they stay
            alive = {int(task) for task in posix.listdir("/proc/self/task")}
            for ident in idents:
                state = self._states.get(ident)
                if state is not None and state.native not in alive:
                    self._states.pop(ident, None)

    def _is_busy(self, state: ThreadState) -> bool:
        """Whether a thread is inside of a plugin, and not because that has a right to keep it there (`Context.pause`)."""
        return state.busy and self._cells[state.beat + PHASE - MODULE] != PAUSED

    def _hooks(self) -> dict[CodeType, list[tuple[Entry, Listener]]]:
        hooks: dict[CodeType, list[tuple[Entry, Listener]]] = {}
        for entry in self._registry:
            for one in entry.listeners:
                code = getattr(getattr(one.call, "__func__", one.call), "__code__", None)
                if code is not None:
                    hooks.setdefault(code, []).append((entry, one))
        return hooks

    def _judge(self, entry: Entry, one: Listener, where: str) -> None:
        times = sum(entry.number in look for look in self._looks)
        share = times / len(self._looks)
        limit = RUNAWAY_RATIO if entry.plugin.longest > 1 else DEAR_RATIO
        if times < LOOKS or share < limit or entry.state != "active":
            return
        self._looks.clear()
        why = f"{one.hook} has kept the training for {times * LOOK_S:.2g} s of one step"
        at = f": it is at {where}" if where else ""
        if entry.is_sampled(one) and self._put_off(entry, share):
            self._page.log("info", f"plugin {entry.name}: {why}, and is called once in {entry.interval} steps now{at}")
        elif not (entry.plugin.mutates or entry.context.is_fixed):
            self._errors.late(entry, one.hook, why + at, where)
        elif entry.number not in self._told:  # a person has asked for just that
            self._told.add(entry.number)
            self._page.log("info", f"plugin {entry.name}: {why}{at}")

    def _put_off(self, entry: Entry, share: float) -> bool:
        """Have the sampled hooks called as seldom as the budget asks for, and in this step no more."""
        budget = self._governor.budget
        times = max(2, math.ceil(share / budget)) if budget > 0 else 2
        if not self._governor.stretch(entry, times):
            return False
        for one in entry.listeners:
            if entry.is_sampled(one) and entry.context.fixed(one.hook) is None:
                one.is_on = False
        self._turned()
        return True


def _hook(frame: Any, hooks: dict[CodeType, list[tuple[Entry, Listener]]]) -> Found | None:
    """Find the hook that a thread is in: a function of a plugin's that hookd has called, "later" where that is a callback."""
    innermost = frame
    while frame is not None:
        if frame.f_code is DELIVER and (entry := frame.f_locals.get("entry")) is not None:
            one = Listener(entry.number, "later", ("numbers",), mutates=False, remembers=False, call=DELIVER)
            return entry, one, line_at(innermost, entry.plugin)
        known = hooks.get(frame.f_code)
        if known is not None and frame.f_back is not None and is_ours(frame.f_back.f_code.co_filename):
            entry, one = known[0] if len(known) == 1 else _whose(frame, known)
            return entry, one, line_at(innermost, entry.plugin)
        frame = frame.f_back
    return None


def _whose(frame: Any, known: list[tuple[Entry, Listener]]) -> tuple[Entry, Listener]:
    """Tell plugins apart that have a function in common, as a class and what is derived of it have."""
    plugin = frame.f_locals.get(frame.f_code.co_varnames[0])
    return next(((entry, one) for entry, one in known if entry.plugin is plugin), known[0])
