"""Portions: module calls that plugins get together, in the hook `forwards`.

A plugin's tensor operations are isolated from the training's. Entering and leaving that isolation costs more than reading a
small tensor, so calls that return small tensors are queued until there are enough of them. Their tensors are kept alive; they
are small, so the training's memory use does not show it.

A module's calls may wait once it has returned a small output that was unchanged at the end of the outermost call. An output
that is changed in place cannot be looked at later. If a module has returned such an output, hookd itself looks at its numbers
as the call returns, and the call waits only if they are finite.
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
"""Maximum size of an output or input of a queued call, in elements."""
ENOUGH = 1 << 21
"""Size of a portion: the elements of all its outputs.

Delivering a portion costs as much as reading 1 MB. Outputs that are still in the processor's cache are read hardly faster
(11 GB/s) than others (9 GB/s).
"""
LEAST = ENOUGH >> 8
"""Fixed overhead of a queued call, in elements; limits the number of queued calls."""
KEPT = 1 << 22
"""Maximum size, in elements, of the small outputs retained during an outermost call, for plugins that read them only after a bad value."""
LIGHT = KEPT >> 14
"""Fixed overhead of a retained call, in elements; limits the number of retained calls."""
LAST = 32
"""Number of retained calls that are still referenced, weakly, after the outermost call."""
WAITS, CHANGES = 1, 2
"""Values of `Module._waits`; 0 means that calls are not queued.

WAITS: calls are queued. CHANGES: calls are queued if the output is finite, because it is changed in place later.
"""
_Tensor = torch.Tensor
_new = tuple.__new__  # a NamedTuple's own constructor takes three times as long


class Portions:
    """Queues calls until there are enough of them, separately for each thread."""

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
        self.changed: set[int] = set()  # Module.id of modules that do not wait and whose output was changed in place
        self._candidates: set[Module] = set()

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        """Whether all numbers of a tensor are surely finite; if not, the plugins look at the tensor themselves."""
        try:
            return not torch_state.is_unreal() and self._numeric.is_surely_finite(tensor)
        except Failure as failure:
            if is_from_signal_handler(failure):
                raise
            return False

    def queue(  # noqa: PLR0917  one call
        self,
        thread: ThreadState,
        module: Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        versions: tuple[int, ...],
    ) -> None:
        """Queue a call that has just returned, or hand it over.

        A call that may not wait is handed over with the pending calls. The call is still at the top of its thread's
        stack.

        Raises:
            TrainingError: a plugin raised it.
        """
        waits, inside = module._waits, thread.top
        failure: BaseException | None = None
        # Reading the version would be seen by a mode, and reading the size would be recorded in a trace.
        # An inference tensor has no version, so the read may raise.
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
                thread.pending.append(call)
                thread.pending_size += output.numel() + LEAST
                if thread.pending_size >= ENOUGH:
                    self.hand_over(thread)
                return
        self._hand_over_last(thread, _new(Call, (module, inputs, kwargs, output, -1, versions, inside, False)), failure)

    def queue_counted(  # noqa: PLR0917  the entry in C calls it
        self,
        thread: ThreadState,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        before: int | tuple[int, ...] | None,
    ) -> None:
        """Queue a counted call that `thread` has left, and whose output C cannot look at.

        `before` is the version of the only input at entry, or the versions of all inputs; None if unknown.

        Raises:
            TrainingError: a plugin raised it.
        """
        if torch_state.is_unreal():  # not a call of the training: no plugin sees it
            self._counting.note_passed()
            torch_state.remember(thread, module, args, output)
            return
        accounts = self._dispatch.accounts
        is_metered, top = accounts.is_metered, thread.top
        begun, charged = (accounts.clock(), accounts.charged) if is_metered else (0, 0)
        thread.handed.add(module)
        thread.top = module, top, float(module.id)
        try:
            self.queue(thread, module, args, kwargs, output, _versions(before))
        finally:
            thread.top = top
        if is_metered:
            accounts.settle(begun, charged)

    def _hand_over_last(self, thread: ThreadState, call: Call, failure: BaseException | None) -> None:
        """Hand over the pending calls, and the one at the top of the thread's stack, which may not wait.

        The call's `version` is not known yet; `failure` is the error that reading it raised, None if it was not read.
        """
        version = -1
        if failure is not None and is_from_signal_handler(failure):
            raise failure
        if failure is None and type(call.output) is _Tensor:
            try:
                with torch_state.unseen():
                    version = call.output._version
            except RuntimeError:  # an inference tensor has no version
                version = -1
        thread.pending.append(call._replace(version=version))
        self.hand_over(thread)

    @staticmethod
    def remember(
        thread: ThreadState, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record the output of a call that is not handed over.

        A small output is kept alive, which costs a tenth of a weak reference; other outputs are referred to weakly.
        """
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
        """Record the output of a call that the C entry cannot record itself."""
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
        """Report a suspect that the C entry has counted: its output is not finite, or an earlier call's output was not.

        The arguments are those of `queue_counted`.

        Raises:
            TrainingError: a plugin raised it.
        """
        inside = (module, thread.top, float(module.id))
        self._suspect(thread, _new(Call, (module, args, kwargs, output, -1, _versions(before), inside, False)))

    def check(  # noqa: PLR0917  one call
        self,
        thread: ThreadState,
        module: Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        versions: tuple[int, ...],
    ) -> None:
        """Check the output of a call that ran through its plan. The C entry does the same for calls that it counts."""
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
        """Whether all numbers of an output are finite or -inf. None if that cannot be found out at once."""
        outputs = [tensor for tensor in (output if type(output) is tuple else (output,)) if tensor is not None]
        try:
            if torch_state.is_unreal() or torch_state.function_modes() or len(outputs) > 8:
                return None
            for tensor in outputs:
                if type(tensor) is not _Tensor or not tensor.is_cpu or tensor.numel() > BRIEF:
                    return None
            numeric = self._numeric
            return all(
                numeric.is_surely_finite(tensor) or numeric.is_finite(tensor, masks=True) is True for tensor in outputs
            )
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
            if thread.pending:
                self.hand_over(thread)
            with torch_state.unseen():
                call = call._replace(version=_version(call.output))
            listeners = dispatch.switched_on("suspect", call.module)
            if listeners:
                dispatch.notify(listeners, {"call": call})
        except Failure as failure:
            dispatch.own_failure("a call that has returned a NaN", failure)

    def let_go(self, thread: ThreadState) -> None:
        """Stop keeping outputs alive after the outermost call; without gradients forget them: no backward needs them."""
        if not torch.is_grad_enabled():
            thread.returned.clear()
            thread.latest[:] = [None] * len(thread.latest)
        elif self._counting.let_go(thread, LAST):
            last: list[Any] = _unrolled(thread)[-LAST:]
            thread.latest[:] = [None] * len(thread.latest)
            with torch_state.unseen():
                # The C entry has turned nearly all of them into tuples of three, which keep nothing alive.
                weak = [
                    record if type(record) is tuple and len(record) == 3 else self._weak(record, thread)
                    for record in last
                ]
                thread.returned[:] = weak  # type: ignore[assignment]
        thread.kept = 0

    @staticmethod
    def _weak(record: Any, thread: ThreadState) -> Any:
        """Return a record of a call that keeps nothing alive. It does not refer to the call's inputs."""
        call = _named(record)
        if isinstance(call, Returned):
            return call
        return _new(Returned, (call.module, passing_ref(call.output, thread.passing), call.version, (), False))

    @staticmethod
    def end_passing(thread: ThreadState) -> None:
        """End the references to tensors that may be buffers, because the training may be about to swap a model's buffers."""
        while thread.passing:
            thread.passing.pop().end()

    @staticmethod
    def returned(thread: ThreadState) -> list[Returned]:
        """Return the recorded calls of a thread."""
        return [
            record if isinstance(record, Returned) else _as_returned(record)
            for record in map(_named, _unrolled(thread))
        ]

    def hand_over(self, thread: ThreadState) -> None:
        """Hand a thread's pending calls to the plugins.

        Raises:
            TrainingError: a plugin raised it.
        """
        calls, size = thread.pending, thread.pending_size
        thread.pending, thread.pending_size = [], 0
        if not self._life.is_live or torch_state.is_unreal():  # reading a size would be recorded in a trace
            self._counting.note_passed()
            return
        try:
            with torch_state.unseen():
                self._notify(thread, calls, size)
                self._learn(thread, calls)
            self._numeric.later.collect()  # a model can be called for long inside of one outermost call
        except Failure as failure:
            self._dispatch.own_failure("pending calls", failure)

    def _notify(self, thread: ThreadState, calls: list[Call], size: int) -> None:
        dispatch = self._dispatch
        listeners = dispatch.switched_on("forwards", None)
        if any(listener.remembers for listener in listeners):
            self._note(thread, calls, size)
        for listener in listeners:
            theirs = calls
            if len(listeners) > 1:
                theirs = [call for call in calls if listener in self._listeners("forwards", call.module)]
            if theirs:
                dispatch.notify([listener], {"calls": theirs})

    @staticmethod
    def _note(thread: ThreadState, calls: list[Call], size: int) -> None:
        """Record the calls of a portion. All but the last are known to be small."""
        *waited, last = calls
        if thread.kept + size <= KEPT + ENOUGH:
            thread.returned += waited
            thread.kept += size
        else:
            for call in waited:
                torch_state.remember(thread, call.module, call.inputs, call.output)
        torch_state.remember(thread, last.module, last.inputs, last.output)

    def _learn(self, thread: ThreadState, calls: list[Call]) -> None:
        """Find out which modules' calls may wait from now on.

        Only the last call of a portion can belong to a module whose calls did not wait.
        """
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
        """Note that outputs of these modules were changed in place."""
        for module in modules:
            if module._waits or module in self._candidates:
                module._waits = CHANGES
                self._candidates.discard(module)
            else:
                self.changed.add(module.id)

    def _settle(self, thread: ThreadState) -> None:
        """Make the candidates wait, except those whose output was changed in place, if it still exists."""
        seen = [(record, record.ref()) for record in self.returned(thread)]
        self._changes(
            record.module
            for record, tensor in seen
            if tensor is not None and of_tensor(tensor, "_version") != record.version
        )
        for module in list(self._candidates):  # hookd's own thread may call `forget` meanwhile
            module._waits = WAITS
        self._candidates.clear()

    def forget(self, modules: Collection[Module]) -> None:
        """Forget the modules of a model that is gone."""
        self._candidates.difference_update(modules)
        self.changed -= {module.id for module in modules}


def _versions(before: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the versions of a call's inputs at entry, from the form in which the C entry passes them; empty if unknown."""
    return () if before is None else before if isinstance(before, tuple) else (before,)


def _version(output: Any) -> int:
    """Return the version of a plain tensor, otherwise -1. An inference tensor has no version."""
    try:
        return output._version if type(output) is _Tensor else -1  # noqa: SLF001
    except RuntimeError:
        return -1


def _unrolled(thread: ThreadState) -> list[Any]:
    """Return a thread's records, with the calls from its ring in the places of their modules in `returned`."""
    records: list[Any] = list(thread.returned)
    place, left = thread.newest, RING
    for at in range(len(records) - 1, -1, -1):
        if type(records[at]) is Module:
            module, output, version = thread.latest[3 * place : 3 * place + 3]
            is_there = left > 0 and module is records[at]
            left -= is_there
            if is_there:
                records[at], place = (module, (), output, version), (place - 1) % RING
            else:
                records[at] = _new(Returned, (records[at], _gone, -1, (), True))
    return records


def _named(record: Call | Returned | tuple[Any, ...]) -> Call | Returned:
    """Return a recorded call as a named tuple.

    The C entry records a bare tuple `(module, inputs, output, version)`, which becomes `(module, weak reference, version)` at the
    end of the outermost call.
    """
    if type(record) is not tuple:
        return record  # type: ignore[return-value]
    if len(record) == 3:
        module, ref, version = record
        return _new(Returned, (module, ref, version, (), False))
    module, inputs, output, version = record
    return _new(Call, (module, inputs, {}, output, version, (), None, False))


def _gone() -> None:
    """Return None, as a dead weak reference does. Stands for an output that was finite and is not kept."""


def _as_returned(call: Call) -> Returned:
    given = tuple(partial(_itself, tensor) for tensor in call.inputs if type(tensor) is _Tensor)
    return Returned(call.module, partial(_itself, call.output), call.version, given)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_small(call: Call) -> bool:
    """Whether a call's inputs and output are small enough to be kept alive."""
    if call.version < 0 or call.output.numel() > SMALL:
        return False
    for value in (*call.inputs, *call.kwargs.values()) if call.kwargs else call.inputs:
        if type(value) is _Tensor and value.numel() > SMALL:
            return False
    return True
