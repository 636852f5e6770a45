"""Check the outputs of modules and models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from hookd import Call, Module, is_whole, names_above, peek, versions
from hookd import tensors as tensors_in
from hookd_nan.scan import INF, Result, on_host, own_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from hookd import Context
    from hookd_nan.blame import Blame
    from hookd_nan.findings import Checks, Findings
    from hookd_nan.inferred_finite import InferredFinite
    from hookd_nan.judge import Details, Event, Judge
    from hookd_nan.pending import Queue
    from hookd_nan.recorder import Recorder
    from hookd_nan.scan import Scan


@dataclass
class Outputs:
    """Checks what modules and models return, and finds the origin of a bad output.

    Attributes:
        judged_whole: by module.id: whether all of its output is checked is known.
        unseen: names of modules whose output is not checked as a whole.
        is_inside: a root is being called, and its modules are checked.
        traced: threads in whose outermost call a bad output was traced back.
    """

    context: Context
    scan: Scan
    checks: Checks
    judge: Judge
    queue: Queue
    findings: Findings
    blame: Blame
    recorder: Recorder
    inferred: InferredFinite
    judged_whole: set[int] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)
    is_inside: bool = False
    traced: set[int] = field(default_factory=set)

    def forwards(self, calls: Sequence[Call]) -> None:
        """Check the outputs of a portion at once, and one by one only if that finds something bad."""
        self._note(calls[-1])
        if not self.judge.pending and self._are_finite(calls):
            return
        if get_ident() in self.traced:  # earlier modules of this outermost call were not checked
            return
        changed: list[str] = []
        for call in calls:
            if call.is_changed() and not call.was_finite:
                changed.append(call.module.name)
            else:
                self._check(call, changed, is_good=call.was_finite)

    def suspect(self, call: Call) -> None:
        """Check a call that C found bad when it returned, or a later one, which may have to judge it."""
        if not self._is_traced(call):
            self._check(call, [])
        self._note(call)

    def _note(self, call: Call) -> None:
        if not call.module.depth:
            self.checks.outputs.note(self.context.step)
            self.is_inside = True

    def _is_traced(self, call: Call) -> bool:
        """Trace a bad output back if an earlier call could not be checked.

        Returns:
            Whether the output was traced back.
        """
        if self.findings.is_over or get_ident() in self.judge.pending or self.context.has_seen_all():
            return False
        result, (in_inputs, unknown) = self.scan(self._outputs(call), masks=True), self._check_inputs(call)
        if not result or not isinstance(result, str) or (call.module.leaf and not in_inputs and not unknown):
            return False
        stack = call.stack()
        event = self.checks.event("output", call.module.name, self.checks.outputs, stack, is_certain=False)
        event = self._traced_back(event, stack[0], call, result, unknown="")
        self.findings.count(event)
        self.findings.report_as_found(event)
        self.traced.add(get_ident())
        return True

    def _are_finite(self, calls: Sequence[Call]) -> bool:
        """Whether all outputs are known to be finite."""
        if calls[-1].version < 0:  # only the last output of a portion may be something other than a single tensor
            outputs = [*self.inferred.to_read(calls[:-1]), *self._outputs(calls[-1])]
        else:
            outputs = self.inferred.to_read(calls)
        if outputs:
            largest = self.context.largest(outputs) if on_host(outputs[-1]) else [math.nan]
            if len(largest) > 1 or any(not isinstance(one, float) or not one < INF for one in largest):
                return False
        self.inferred.note(calls[-1])
        return True

    def _check(self, call: Call, changed: list[str], *, is_good: bool = False) -> None:
        """Check a single call.

        Args:
            call: a call that has returned.
            changed: names of modules called earlier whose outputs were changed since; emptied if this output is good.
            is_good: the output is known to have been good; it may have been changed since.
        """
        result = "" if is_good else self.scan(self._outputs(call), masks=True)
        if self.findings.is_over:
            self._spread(call.module, result)
        elif result or self.judge.pending:
            self._returned(call, result, changed)
        else:
            changed.clear()  # an earlier bad value would most likely have reached this output

    def _spread(self, module: Module, result: Result) -> None:
        """Count a consequence of the origin."""
        if result and isinstance(result, str):
            self.findings.count_one(module.name, "output", result, self.context.step)
        elif result:
            self._submit(self.findings.count, self.checks.event("output", module.name), result)

    def _submit(self, judge: Callable[[Event], None], event: Event, *results: Result) -> None:
        self.queue.submit(judge, event, *results, masks=not self.scan.neginf)

    def _returned(self, call: Call, result: Result, changed: list[str]) -> None:
        """Judge a call whose output is or may be bad, or that must judge a call of a module in it."""
        module = call.module.torch()
        own = own_tensors(module)
        in_own = [self.scan.own(tensors.values()) for tensors in own]
        in_inputs, unknown = self._check_inputs(call)
        is_known = all(isinstance(one, str) for one in (result, in_inputs, *in_own))
        event = self.checks.event(
            "output",
            call.module.name,
            self.checks.outputs,
            call.stack(),
            may_write=peek(module, "training") is True,
            is_certain=not changed,
            own=() if is_known else tuple(list(one) for one in own),
        )
        if is_known:
            event = replace(event, kind=str(result), inputs=str(in_inputs), at=self._place(call))
            event = replace(event, details=self._numbers(event, call, own, *map(str, in_own)))
            if result and not in_inputs and not self.scan.neginf and self.scan(tensors_in((call.inputs, call.kwargs))):
                event = event.having(neginf_in="inputs")
        if unknown:
            event = event.having(inputs=unknown)
        self._submit(self._judge_call, self._with_unseen(event, changed), result, in_inputs, *in_own)

    def _check_inputs(self, call: Call) -> tuple[Result, str]:
        """Check the inputs of a call.

        Returns:
            The result, and why it is not complete: "unknown" if the inputs were changed since the call began, "partly"
            if not all of them can be checked, else "".
        """
        result = self.scan(tensors_in((call.inputs, call.kwargs)), masks=True)
        if result and call.before and call.before != versions(call.inputs, call.kwargs):
            return "", "unknown"
        return result, "" if result or is_whole((call.inputs, call.kwargs)) else "partly"

    def _outputs(self, call: Call) -> list[Tensor]:
        """Return the tensors in an output; record the module in `unseen` if its output has parts that cannot be checked."""
        module = call.module
        if module.id not in self.judged_whole and not issubclass(type(call.output), torch.Tensor):
            self.judged_whole.add(module.id)
            if not is_whole(call.output):
                self.unseen.append(module.name)
        return tensors_in(call.output)

    def _with_unseen(self, event: Event, names: Sequence[str] = ()) -> Event:
        """Return the event with the names of other modules that may be the origin, as `or_in`."""
        names = [*event.details.get("or_in", ()), *names, *(x for x in self.unseen if event.module in names_above(x))]
        return event.having(or_in=list(dict.fromkeys(names))) if names and event.where == "output" else event

    def _numbers(
        self, event: Event, call: Call, own: tuple[Mapping[str, Tensor], ...], parameters: str, buffers: str
    ) -> Details:
        """Return the counts of the tensor that is to blame for the output of a call."""
        if event.kind and parameters:
            return self.scan.details(own[0], parameters)
        of_buffer = self.scan.details(own[1], buffers) if event.kind and buffers and not event.inputs else None
        if of_buffer and not event.may_write:
            return {**of_buffer, "is_buffer": True}
        details = self._of_output(call, event.kind)
        return {**details, "buffer": of_buffer["parameter"]} if of_buffer else details

    def _of_output(self, call: Call, kind: str) -> Details:
        """Return the counts of the first tensor of an output with a bad value of this kind."""
        return self.scan.details(dict(enumerate(tensors_in(call.output))), kind) if kind else {}

    def _place(self, call: Call) -> int | None:
        """Return how many calls had returned before this one, None for all."""
        outputs = tensors_in(call.output)
        places = (at for at, one in enumerate(self.context.returned()) if any(one.ref() is x for x in outputs))
        return next(places, None)

    def _judge_call(self, event: Event) -> None:
        self.findings.count(event)
        if event.ends and not event.kind:
            self.recorder.seen.append((event.module, *event.ends))
        origin = self.judge.call(event)
        if origin is not None and origin.where == "output" and not self.findings.is_over:
            origin = self.blame.below(origin)
        if origin is not None and origin.where != "output":
            origin = replace(origin, is_certain=True).without("or_in")
        self.findings.report(origin)

    def root_forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Check the output of a model in steps in which its modules are not checked."""
        self.traced.discard(get_ident())
        self.checks.gates.note(self.context.step)
        if self.context.has_seen_all():
            self.checks.outputs.note(self.context.step)
        if self.is_inside:
            self.is_inside = False
            self.inferred.forget()
            return
        result = self.scan(tensors_in(output), masks=True)
        if self.findings.is_over:
            self._spread(module, result)
        elif result:
            self._gate_hit(Call(module, inputs, kwargs, output, -1, versions, None), result)

    def _gate_hit(self, call: Call, result: Result) -> None:
        """Find the origin of a model's bad output: its input, a parameter, or the first call with a bad output."""
        event = self.checks.event("output", call.module.name, self.checks.outputs, is_certain=call.module.leaf)
        in_inputs, unknown = self._check_inputs(call)
        if isinstance(result, str) and isinstance(in_inputs, str) and not in_inputs:
            event = self._traced_back(event, call.module, call, result, unknown=unknown)
            result = event.kind
        self._submit(self._judge_gate, event, result, in_inputs)

    def _traced_back(self, event: Event, root: Module, call: Call, result: str, *, unknown: str) -> Event:
        """Return the event with the origin of a bad output: a parameter, or the first call with a bad output."""
        event = self.blame.parameter(replace(event, kind=result, details=self._of_output(call, result)), root)
        if event.where == "param":
            return event
        event = self.blame.buffer(self.blame.call(event, unknown), root)
        if event.where == "output":
            event = self.blame.below(event)
        return self._with_unseen(event)

    def _judge_gate(self, event: Event) -> None:
        self.findings.count(event)
        self.findings.report(self.judge.root(event))

    def forward_error(self, module: Module) -> None:
        """Forget the call whose caller was to judge it: that caller will not return."""
        self.judge.pending.pop(get_ident(), None)
        if not module.depth:
            self.is_inside = False
            self.traced.discard(get_ident())
