"""Calls of modules that are handed over to plugins some at a time: the hook `forwards`. Runs in the target.

Entering what keeps a plugin's tensor operations apart from the training's, and leaving it, costs more than looking at a
small tensor. So the calls that return small tensors wait for each other. What waits is kept alive: it is small, so that
the training's memory does not show it. A module is believed to make such outputs when it has made one that was as it
returned it when the outermost call was done; one whose output is changed in place makes none for ever, for nobody could
tell what it returned.
"""

from __future__ import annotations

import operator
import weakref
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from hookd.agent import quiet
from hookd.agent.faults import Failure
from hookd.events import Call, Returned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.agent.session import Session
    from hookd.agent.threads import Kept, ThreadState
    from hookd.events import Module

MOST = 32
"""So many calls are handed over at a time."""
SMALL = 1 << 17
"""Elements of an output, and of an input, of a call that may wait;"""
ENOUGH = 1 << 18
"""and of all outputs that are handed over together, so that they are still in the processor's cache."""
KEPT = 1 << 22
"""Elements of small outputs that are kept alive inside of an outermost call, for who looks only where something is bad;"""
LAST = 32
"""and so many of the calls are still known, weakly, when it is over."""
_Tensor = torch.Tensor
_version, _size = operator.attrgetter("_version"), _Tensor.numel
_new, _ref = tuple.__new__, weakref.ref  # a NamedTuple's own constructor takes three times as long


class Portions:
    """Holds calls until there are enough of them, for each thread its own.

    Attributes:
        waiting: by `Module.id`: of those whose calls wait, the elements of an output.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.waiting: dict[int, int] = {}
        self._changed: set[int] = set()
        self._candidates: dict[int, int] = {}

    def hold(
        self, thread: ThreadState, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: tuple[int, ...]
    ) -> None:
        """Take the call that has just returned; it is the one at the top of the thread's stack."""
        inside = thread.top
        assert inside is not None
        module, version = inside[0], -1
        if type(output) is _Tensor and not quiet.function_modes():  # a mode would see that the version is asked for
            try:
                version = output._version
            except RuntimeError:  # an inference tensor counts none
                version = -1
        thread.held.append((module, inputs, kwargs, output, version, before, inside))
        size = self.waiting.get(module.id, ENOUGH)
        thread.held_size += size
        if thread.held_size >= ENOUGH or version < 0 or inside[1] is None or len(thread.held) >= MOST:
            self.hand_over(thread)

    def remember(self, thread: ThreadState, module: Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note what a call has returned that nobody is told of; weak references cost ten times as much as keeping it."""
        size = self.waiting.get(module.id)
        if size is not None and type(output) is _Tensor and thread.kept < KEPT and not quiet.function_modes():
            try:
                thread.returned.append((module, inputs, output, output._version))
                thread.kept += size
                return
            except RuntimeError:  # an inference tensor
                pass
        quiet.remember(thread.returned, module, inputs, output)

    def let_go(self, thread: ThreadState) -> None:
        """Keep nothing alive any more: the outermost call is over."""
        last: list[Any] = []
        for one in thread.returned[-LAST:]:
            if isinstance(one, Returned):
                last.append(one)
            else:
                quiet.remember(last, *one[:3])
        thread.returned[:], thread.kept = last, 0

    @staticmethod
    def returned(thread: ThreadState) -> list[Returned]:
        """Give what is remembered of a thread's calls."""
        return [one if isinstance(one, Returned) else _as_returned(*one) for one in thread.returned]

    def hand_over(self, thread: ThreadState) -> None:
        """Give the plugins what a thread holds.

        Raises:
            TrainingError: a plugin may raise it.
        """
        calls = list(map(_new, repeat(Call), thread.held))
        thread.held, thread.held_size = [], 0
        if not self._session.is_live or quiet.is_unreal():  # a trace would note that the size is asked for
            return
        try:
            self._tell(thread, calls)
            self._learn(thread, calls)
        except Failure as failure:
            self._session.dispatch.own_failure("calls that were held", failure)

    def _tell(self, thread: ThreadState, calls: list[Call]) -> None:
        dispatch, models = self._session.dispatch, self._session.models
        heard = dispatch.switched_on("forwards", None)
        if any(one.remembers for one in heard):
            self._note(thread.returned, calls)
        for one in heard:
            theirs = calls
            if len(heard) > 1:
                theirs = [call for call in calls if one in models.listeners("forwards", call.module)]
            if theirs:
                dispatch.tell([one], {"calls": theirs})

    @staticmethod
    def _note(returned: list[Returned | Kept], calls: list[Call]) -> None:
        for call in calls:
            if call.version < 0:
                quiet.remember(returned, call.module, call.inputs, call.output)
            elif len(returned) < quiet.REMEMBERED:  # without the inputs, which nobody will have to be led back by
                returned.append(_new(Returned, (call.module, _ref(call.output), call.version, ())))

    def _learn(self, thread: ThreadState, calls: list[Call]) -> None:
        """Find out which of them may wait the next time; what may not is always the last of a portion."""
        last = calls[-1]
        if last.module.id not in self.waiting and last.module.id not in self._changed and _is_small(last):
            self._candidates[last.module.id] = last.output.numel()
        waited = calls[:-1]
        outputs = [call.output for call in waited]
        if list(map(_version, outputs)) != [call.version for call in waited] or sum(map(_size, outputs)) > 2 * ENOUGH:
            for call in waited:
                self._look(call)
        if self._candidates and thread.top is not None and thread.top[1] is None:
            self._settle(thread)

    def _look(self, call: Call) -> None:
        """See whether a call that has waited may do so again: its output was changed, or has grown."""
        self.waiting.pop(call.module.id, None)
        if call.is_changed():
            self._changed.add(call.module.id)
        elif _is_small(call):
            self.waiting[call.module.id] = call.output.numel()

    def _settle(self, thread: ThreadState) -> None:
        """Let wait what has given small outputs that nothing has changed, as far as they are still there."""
        for one in self.returned(thread):
            tensor = one.ref()
            if tensor is not None and tensor._version != one.version:
                self._changed.add(one.module.id)
        self.waiting.update((number, size) for number, size in self._candidates.items() if number not in self._changed)
        self._candidates.clear()

    def forget(self, modules: Iterable[Module]) -> None:
        """Forget a model that is gone."""
        for module in modules:
            self.waiting.pop(module.id, None)
            self._candidates.pop(module.id, None)
            self._changed.discard(module.id)


def _as_returned(module: Module, inputs: tuple[Any, ...], output: Any, version: int) -> Returned:
    given = tuple(partial(_itself, one) for one in inputs if type(one) is _Tensor)
    return Returned(module, partial(_itself, output), version, given)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_small(call: Call) -> bool:
    """Whether what a call was given and gave back may be kept alive."""
    if call.version < 0 or call.output.numel() > SMALL:
        return False
    for one in (*call.inputs, *call.kwargs.values()) if call.kwargs else call.inputs:
        if type(one) is _Tensor and one.numel() > SMALL:
            return False
    return True
