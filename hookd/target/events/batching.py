"""Calls of modules that are handed over to plugins some at a time: the hook `forwards`. Runs in the target.

Entering what keeps a plugin's tensor operations apart from the training's, and leaving it, costs more than looking at a
small tensor. So the calls that return small tensors wait for each other. What waits is kept alive: it is small, so that
the training's memory does not show it. A module is believed to make such outputs when it has made one that was as it
returned it when the outermost call was done. An output that is changed in place cannot be looked at later: of a module
that has made such a one the numbers are looked at as it returns, without a plugin, and if they are finite it waits, too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hookd.api.events import Call, Module, Returned
from hookd.api.passive import of_tensor
from hookd.api.refs import passing_ref
from hookd.target.entry.threads import RING
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.target.tensors import torch_state
from hookd.target.tensors.kernel import BRIEF

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hookd.target.boot.arming import Life
    from hookd.target.entry.counting import Counting
    from hookd.target.entry.threads import ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.plugins.listeners import Listener
    from hookd.target.tensors.statistics import Numeric

SMALL = 1 << 20
"""Elements of an output, and of an input, of a call that may wait;"""
ENOUGH = 1 << 21
"""and of all outputs that are handed over together. To hand over costs as much as to read 1 MB; and what a model has just
made is hardly read faster (11 GB/s) than what has left the processor's cache (9 GB/s)."""
LEAST = ENOUGH >> 8
"""As so many more elements a call counts that waits, so that not too many do."""
KEPT = 1 << 22
"""Elements of small outputs that are kept alive inside of an outermost call, for who looks only where something is bad;"""
LIGHT = KEPT >> 14
"""as so many more a call counts there;"""
LAST = 32
"""and so many of the calls are still known, weakly, when it is over."""
WAITS, CHANGES = 1, 2
"""What `Module._waits` is: its outputs wait, or do so where they are finite, for they are changed in place; else 0."""
_Tensor = torch.Tensor
_new = tuple.__new__  # a NamedTuple's own constructor takes three times as long


class Portions:
    """Holds calls until there are enough of them, for each thread its own.

    Args:
        listeners: returns who listens to a hook at a module.
    """

    def __init__(
        self,
        *,
        life: Life,
        numeric: Numeric,
        counting: Counting,
        dispatch: Dispatch,
        listeners: Callable[[str, Module | None], list[Listener]],
    ) -> None:
        self._life, self._numeric, self._counting, self._dispatch = life, numeric, counting, dispatch
        self._listeners = listeners
        self.changed: set[int] = set()  # by Module.id: of those that do not wait, whose output was changed in place
        self._candidates: set[Module] = set()

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        """Whether all numbers of a tensor are; where that cannot be said at once, the plugins are to look at it themselves."""
        try:
            return not torch_state.is_unreal() and self._numeric.is_surely_finite(tensor)
        except Failure as failure:
            if is_from_signal_handler(failure):
                raise
            return False

    def hold(  # noqa: PLR0917  one call
        self,
        thread: ThreadState,
        module: Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        versions: tuple[int, ...],
    ) -> None:
        """Hold a call that has just returned, at the top of its thread's stack, or hand it over with what is held: it may not wait.

        Raises:
            TrainingError: a plugin may raise it.
        """
        waits, inside = module._waits, thread.top
        failure: BaseException | None = None
        # An inference tensor has no version; a mode would see that it is asked for, and a trace would have the size in it.
        if (
            waits
            and inside is not None
            and inside[1] is not None
            and type(output) is _Tensor
            and not torch_state.function_modes()
            and torch_state.tracing() is None
            and (waits == WAITS or self._is_finite(output))
        ):
            try:
                call: Call = _new(
                    Call, (module, inputs, kwargs, output, output._version, versions, inside, waits == CHANGES)
                )
            except Failure as error:
                failure = error
            else:
                thread.held.append(call)
                thread.held_size += output.numel() + LEAST
                if thread.held_size >= ENOUGH:
                    self.hand_over(thread)
                return
        self._hold_last(thread, _new(Call, (module, inputs, kwargs, output, -1, versions, inside, False)), failure)

    def hold_counted(  # noqa: PLR0917  the entry in C calls it
        self,
        thread: ThreadState,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        before: int | tuple[int, ...] | None,
    ) -> None:
        """Hold a call that the entry in C has counted, and whose output it cannot look at.

        Args:
            thread: the calling one, back outside of the call.
            module: that was called.
            args: by position.
            kwargs: by name.
            output: that was returned.
            before: the version of the only input at entry, or those of all; None where that is not known.

        Raises:
            TrainingError: a plugin may raise it.
        """
        if torch_state.is_unreal():  # nobody is told of it
            self._counting.note_passed()
            torch_state.remember(thread, module, args, output)
            return
        accounts = self._dispatch.accounts
        is_metered, top = accounts.is_metered, thread.top
        begun, charged = (accounts.clock(), accounts.charged) if is_metered else (0, 0)
        thread.handed.add(module)
        thread.top = module, top, float(module.id)
        try:
            self.hold(thread, module, args, kwargs, output, _versions(before))
        finally:
            thread.top = top
        if is_metered:
            accounts.settle(begun, charged)

    def _hold_last(self, thread: ThreadState, call: Call, failure: BaseException | None) -> None:
        """Hand over with what is held a call that may not wait.

        Args:
            thread: the calling one.
            call: the one at the top of its stack; its `version` is not known yet.
            failure: why it is not; None: that was not asked.
        """
        version = -1
        if failure is not None and is_from_signal_handler(failure):
            raise failure
        if failure is None and type(call.output) is _Tensor:
            try:
                with torch_state.unseen():
                    version = call.output._version
            except RuntimeError:  # an inference tensor counts none
                version = -1
        thread.held.append(call._replace(version=version))
        self.hand_over(thread)

    @staticmethod
    def remember(
        thread: ThreadState, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a call has returned that is not handed over: weakly, or where it is small by keeping it, at a tenth of the cost."""
        if (
            module._waits
            and thread.kept < KEPT
            and type(output) is _Tensor
            and not torch_state.function_modes()
            and torch_state.tracing() is None
        ):
            try:
                thread.returned.append(_new(Call, (module, inputs, kwargs, output, output._version, (), None, False)))
                thread.kept += output.numel() + LIGHT
            except Failure as failure:
                if is_from_signal_handler(failure):
                    raise
            else:
                return
        torch_state.remember(thread, module, inputs, output)

    def remember_call(
        self, thread: ThreadState, module: Module, args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
    ) -> None:
        """Remember a call that the entry in C cannot."""
        torch_state.remember(thread, module, args, output)

    def suspect(  # noqa: PLR0917  the entry in C calls it
        self,
        thread: ThreadState,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        before: int | tuple[int, ...] | None,
    ) -> None:
        """Tell of a call that the entry in C has counted, whose output is not finite, or that has returned after such a one.

        Args:
            thread: the calling one, back outside of the call.
            module: that was called.
            args: by position.
            kwargs: by name.
            output: that was returned.
            before: the version of the only input at entry, or those of all; None where that is not known.

        Raises:
            TrainingError: a plugin may raise it.
        """
        inside = (module, thread.top, float(module.id))
        self._suspect(thread, _new(Call, (module, args, kwargs, output, -1, _versions(before), inside, False)))

    def look(  # noqa: PLR0917  one call
        self,
        thread: ThreadState,
        module: Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        versions: tuple[int, ...],
    ) -> None:
        """Do for a call that has gone through its plan what the entry in C does for one that it counts."""
        counting = self._counting
        if not counting.is_alert:
            is_root = thread.top is None or thread.top[1] is None
            is_good = is_root or (self._is_good(output) if counting.looks else None)
            if is_good is None:
                counting.note_passed()
            if is_good is not False:
                return
        self._suspect(thread, _new(Call, (module, inputs, kwargs, output, -1, versions, thread.top, False)))

    def _is_good(self, output: Any) -> bool | None:
        """Whether all numbers of an output are finite, or -inf; None: that cannot be said at once."""
        found = [one for one in (output if type(output) is tuple else (output,)) if one is not None]
        try:
            if torch_state.is_unreal() or torch_state.function_modes() or len(found) > 8:
                return None
            for one in found:
                if type(one) is not _Tensor or not one.is_cpu or one.numel() > BRIEF:
                    return None
            numeric = self._numeric
            return all(numeric.is_surely_finite(one) or numeric.is_finite(one, masks=True) is True for one in found)
        except Failure as failure:
            if is_from_signal_handler(failure):
                raise
            return None

    def _suspect(self, thread: ThreadState, call: Call) -> None:
        dispatch = self._dispatch
        try:
            if not self._life.is_live or torch_state.is_unreal():
                return
            self._counting.alert()
            if thread.held:
                self.hand_over(thread)
            with torch_state.unseen():
                call = call._replace(version=_version(call.output))
            heard = dispatch.switched_on("suspect", call.module)
            if heard:
                dispatch.tell(heard, {"call": call})
        except Failure as failure:
            dispatch.own_failure("a call that has returned a NaN", failure)

    def let_go(self, thread: ThreadState) -> None:
        """Keep nothing alive any more: the outermost call is over. Without gradients no backward will ask what has returned."""
        if not torch.is_grad_enabled():
            thread.returned.clear()
            thread.latest[:] = [None] * len(thread.latest)
        elif self._counting.let_go(thread, LAST):
            last: list[Any] = _unrolled(thread)[-LAST:]
            thread.latest[:] = [None] * len(thread.latest)
            with torch_state.unseen():
                # The entry has left nearly all as tuples of three, which keep nothing alive.
                weak = [one if type(one) is tuple and len(one) == 3 else self._weak(one, thread) for one in last]
                thread.returned[:] = weak  # type: ignore[assignment]
        thread.kept = 0

    @staticmethod
    def _weak(one: Any, thread: ThreadState) -> Any:
        """Return what keeps nothing of a call alive; nobody is led back from there to what it was given."""
        call = _named(one)
        if isinstance(call, Returned):
            return call
        return _new(Returned, (call.module, passing_ref(call.output, thread.passing), call.version, (), False))

    @staticmethod
    def end_passing(thread: ThreadState) -> None:
        """End the references to what may be a model's buffer, which the training may be about to swap."""
        while thread.passing:
            thread.passing.pop().end()

    @staticmethod
    def returned(thread: ThreadState) -> list[Returned]:
        """Give what is remembered of a thread's calls."""
        return [one if isinstance(one, Returned) else _as_returned(one) for one in map(_named, _unrolled(thread))]

    def hand_over(self, thread: ThreadState) -> None:
        """Give the plugins what a thread holds.

        Raises:
            TrainingError: a plugin may raise it.
        """
        calls, size = thread.held, thread.held_size
        thread.held, thread.held_size = [], 0
        if not self._life.is_live or torch_state.is_unreal():  # a trace would note that the size is asked for
            self._counting.note_passed()
            return
        try:
            with torch_state.unseen():
                self._tell(thread, calls, size)
                self._learn(thread, calls)
        except Failure as failure:
            self._dispatch.own_failure("calls that were held", failure)

    def _tell(self, thread: ThreadState, calls: list[Call], size: int) -> None:
        dispatch = self._dispatch
        heard = dispatch.switched_on("forwards", None)
        if any(one.remembers for one in heard):
            self._note(thread, calls, size)
        for one in heard:
            theirs = calls
            if len(heard) > 1:
                theirs = [call for call in calls if one in self._listeners("forwards", call.module)]
            if theirs:
                dispatch.tell([one], {"calls": theirs})

    @staticmethod
    def _note(thread: ThreadState, calls: list[Call], size: int) -> None:
        """Remember a portion; all but the last of it are known to be small."""
        *waited, last = calls
        if thread.kept + size <= KEPT + ENOUGH:
            thread.returned += waited
            thread.kept += size
        else:
            for call in waited:
                torch_state.remember(thread, call.module, call.inputs, call.output)
        torch_state.remember(thread, last.module, last.inputs, last.output)

    def _learn(self, thread: ThreadState, calls: list[Call]) -> None:
        """Find out which of them may wait the next time; what may not is always the last of a portion."""
        *waited, last = calls
        if not last.module._waits and _is_small(last):
            if last.module.id in self.changed:
                last.module._waits = CHANGES
                self.changed.discard(last.module.id)
            else:
                self._candidates.add(last.module)
        if [call.version for call in waited] != [call.output._version for call in waited]:  # noqa: SLF001
            self._changes(call.module for call in waited if call.is_changed())
        if self._candidates and thread.top is not None and thread.top[1] is None:
            self._settle(thread)

    def _changes(self, modules: Iterable[Module]) -> None:
        """Outputs of these were changed in place."""
        for module in modules:
            if module._waits or module in self._candidates:
                module._waits = CHANGES
                self._candidates.discard(module)
            else:
                self.changed.add(module.id)

    def _settle(self, thread: ThreadState) -> None:
        """Let wait what has given small outputs that nothing has changed, as far as they are still there."""
        seen = [(one, one.ref()) for one in self.returned(thread)]
        self._changes(
            one.module for one, tensor in seen if tensor is not None and of_tensor(tensor, "_version") != one.version
        )
        for module in list(self._candidates):  # hookd's own thread may be forgetting some
            module._waits = WAITS
        self._candidates.clear()

    def forget(self, modules: Collection[Module]) -> None:
        """Forget a model that is gone."""
        self._candidates.difference_update(modules)
        self.changed -= {module.id for module in modules}


def _versions(before: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the versions of a call's inputs at entry, of what the entry in C has for them; nothing where it does not know."""
    return () if before is None else before if isinstance(before, tuple) else (before,)


def _version(output: Any) -> int:
    """Return the version of a plain tensor, -1 of anything else; an inference tensor has none."""
    try:
        return output._version if type(output) is _Tensor else -1  # noqa: SLF001
    except RuntimeError:
        return -1


def _unrolled(thread: ThreadState) -> list[Any]:
    """Return what a thread remembers, with the calls of its ring in the place of their modules."""
    found: list[Any] = list(thread.returned)
    place, left = thread.newest, RING
    for at in range(len(found) - 1, -1, -1):
        if type(found[at]) is Module:
            module, output, version = thread.latest[3 * place : 3 * place + 3]
            is_there = left > 0 and module is found[at]
            left -= is_there
            found[at] = (module, (), output, version) if is_there else _new(Returned, (found[at], _gone, -1, (), True))
            place = (place - 1) % RING if is_there else place
    return found


def _named(one: Call | Returned | tuple[Any, ...]) -> Call | Returned:
    """Return a remembered call by its names.

    The entry in C remembers a bare tuple `(module, inputs, output, version)`, and when the outermost call is over
    `(module, weak reference, version)`.
    """
    if type(one) is not tuple:
        return one  # type: ignore[return-value]
    if len(one) == 3:
        module, ref, version = one
        return _new(Returned, (module, ref, version, (), False))
    module, inputs, output, version = one
    return _new(Call, (module, inputs, {}, output, version, (), None, False))


def _gone() -> None:
    """Stand in for a reference to an output that is not kept, for it was finite."""


def _as_returned(call: Call) -> Returned:
    given = tuple(partial(_itself, one) for one in call.inputs if type(one) is _Tensor)
    return Returned(call.module, partial(_itself, call.output), call.version, given)


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
