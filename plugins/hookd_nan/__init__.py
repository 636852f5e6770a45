"""Where the first NaN or infinity was born: module, place and step. Runs in the target.

    hookd_nan_nonfinite_total{module,where,kind}   tensors seen with a NaN (kind nan) or else an infinity (inf)
    hookd_nan_origin{module,where,kind}            1 for the place where the first one was born
    hookd_nan_first_step                           the step in which that was
    hookd_nan_amp_skipped_steps_total              steps that a GradScaler skipped because the gradients overflowed

How often it looks. At every step there is a *gate*: what a model gives back, the loss, and the gradients that an
optimizer is about to use. The modules are looked at as often as the budget allows, at least one step in ten (the metric
`hookd_sampling_interval_steps` says which), and the gradients that flow between them, which cost several times as much,
at least one step in a hundred: that a gradient is bad the gate sees at once, this says which module made it. After a
hit of the gate every module and every gradient is looked at, until the origin is known. An incident says `exact`, or
`born since step X`: X is the first step in which that place was not looked at. With `every=1` the outputs of all
modules are looked at in every step, whatever that costs; `every=N` in one step of N.

How the origin is found. A module call whose output is bad, though its inputs and its own parameters are not, made the
bad value itself: a container too, whose own code or hook did it. If one of its own parameters is bad, that is named.
If its inputs were bad already, the module that called it decides when it returns, and at the outermost call the input
of the model is to blame. A module that changed its inputs in place is named with the remark that they are unknown. In
a backward, the first bad gradient in the order of execution is the origin; a bad loss after good outputs has no module.
What follows from the origin is counted, but not reported again. Where the gate alone has seen it, in a step in which
the modules were not looked at, a bad input, a bad parameter and a bad loss are known at once. A bad output of the model
is traced back through the calls in it, as far as their inputs and outputs still live: the first bad output is named, or
if its input was bad, the module whose code called it; and the modules before it whose outputs are gone (`or_in`). Of bad
gradients, the parameter whose gradient came first is named.
A second incident names the module when it makes another one. It never does if an optimizer has used the bad gradients
in the meantime: then all parameters are bad, and nothing is known but the first incident.

Gradients under a GradScaler overflow on purpose. So a bad gradient is only a suspect until it is known what became of
it: an optimizer step about to use it makes it an origin; a fused optimizer told of `found_inf`, or gradients that were
cleared before any step used them, make it a skipped step. After `amp_patience` skipped steps in a row it is reported
after all: no scale is that large. (Code that throws bad gradients away by itself looks the same, and is treated so.)

An incident has the numbers of the last `recorder` module calls (20) whose modules were looked at, as far as their
outputs are still alive, and loss, largest gradient and learning rate of the last steps; the stacks of modules and of
Python; and exact counts of the tensor.

What is done about it, beside telling of it, says `policy`; all but `report` change training and count in
`hookd_nan_policy_total{policy}`. `raise` raises `FloatingPointError` in the training code, once. `pause` stops the
training where it is, once, until `policy=report` is configured or the agent leaves; other ranks wait for this one at
their next collective. `skip` sets `.grad = None` before each optimizer step whose gradients are bad: they are reduced
by then, so all ranks decide the same; where each rank holds a part of them (FSDP) it refuses. It cannot skip what an
optimizer computes inside its step (LBFGS), and on a device it waits for the gradients, as GradScaler does.

With `capture=true` an incident comes with a *repro bundle* (docs/nan.md): `hookd replay BUNDLE` makes the call again in a
fresh process. It carries the module of the origin; where the gate alone has seen it, or a backward that was looked at,
the whole model, and the replay tells the module. It is copied at the moment and written by a thread of hookd's, below
`capture_dir` (a place for a program's state or for temporary files), for the owner alone. The incident has the path as
`bundle`, or in `no_bundle` why there is none: above `capture_bytes` (256 MiB) nothing is written, and what was on a
device is gone by then. Another one (`bundle`, `bundle_failed`) says what became of it. What a model was called with is
kept until the end of the step for that, and the state of the random numbers is read when a module begins.

`-inf` alone in outputs, inputs and parameters is no finding unless `neginf=true`: attention masks are made of it.

Limits: in the first steps after an attach, a module that is not observed yet is reported as the module that called it:
a deep model is learnt over some steps, parents first. What a module on a GPU made is known a step or two later, with
its exact step; there, a parameter that goes bad between two looks at the modules is seen as its model's output, and no
bad output is traced back.
"""

from __future__ import annotations

import math
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

import hookd
from hookd import Context, Module, Plugin, PluginError, hookimpl, versions
from hookd import tensors as tensors_in
from hookd_nan import trace
from hookd_nan.capture import Call, Capture
from hookd_nan.gradients import Gradients
from hookd_nan.judge import Event, Judge, Looks
from hookd_nan.pending import Queue
from hookd_nan.policy import POLICIES, Policy
from hookd_nan.recorder import Recorder
from hookd_nan.report import Reporter
from hookd_nan.scan import INF, Found, Scan, Seen, is_bad, on_host, own_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["NaN"]


class NaN(Plugin):
    """Looks at every output, every gradient that flows and every loss, and names the first that is not finite."""

    name = "nan"
    sampled = ("forward_pre", "forward", "forwards", "backward_pre", "backward")
    every = 1
    longest = 10
    rare = ("backward_pre", "backward")
    rarest = 100
    remembers = True
    fixed_by_every = ("forward_pre", "forward", "forwards")
    mutating = ("step_pre",)  # with a policy other than report

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options, and declare the metrics."""
        self.context = context
        self.scan = Scan(context, neginf=context.option("neginf", default=False))
        patience = context.option("amp_patience", 30)
        if patience < 1:
            raise PluginError(f"nan: amp_patience must be at least 1, not {patience}")
        labels = ["module", "where", "kind"]
        self.nonfinite = context.counter("nonfinite", "Tensors seen with a NaN or else an infinity.", labels)
        self.recorder = Recorder(context)
        self.policy = Policy(context, context.option("policy", "report", POLICIES))
        self.mutates = self.policy.name != "report"
        self.capture = Capture(context, masks=not self.scan.neginf)
        self.captures = self.capture.is_on
        self.reporter = Reporter(context, self.recorder, self.policy, self.capture)
        self.skipped = context.counter("amp_skipped_steps", "Optimizer steps skipped for overflowed gradients.")
        self.skipped.inc(0)  # so that the series is there from the start
        self.is_finite = context.is_finite
        self.judge = Judge(patience)
        self.gradients = Gradients(context, self.scan)
        self.queue = Queue(context)
        self.seen = Seen()
        self.outputs, self.backwards, self.gates = Looks(), Looks(), Looks()
        self.is_inside = False  # a root is being called whose modules are looked at
        self.stepping: Optimizer | None = None
        self.scaled = False  # the last loss looked like one that a GradScaler scaled
        self.masks = not self.scan.neginf
        self.order = 0
        self.reached: dict[int, int] = {}  # by module.id: when in that order a gradient last reached it
        self.is_skipping = False  # the step in progress is one whose gradients were taken away
        self.undecided: list[Event] = []  # bad gradients, not counted until it is known what becomes of them

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Want every module; what leaves a container is seen when it leaves the first module in it, at less cost."""
        hooks = {"root_forward", "forward_error", "backward_pre", "backward"}
        if self.captures:
            self.capture.learn(module)
            hooks |= {"forward", "forward_pre" if module.depth else "root_forward_pre"}
        else:
            hooks.add("forwards")
        return hooks if module.leaf else hooks - {"backward"}

    # -- forward

    @hookimpl
    def forward_pre(self, module: Module) -> None:
        """Note with which random numbers a module is entered; selected for bundles alone."""
        self.capture.enter(module)

    @hookimpl
    def root_forward_pre(self, module: Module) -> None:
        """Note the same of a model, also in the steps in which its modules are not looked at."""
        self.capture.enter(module)

    @hookimpl
    def forwards(self, calls: Sequence[hookd.Call]) -> None:
        """Look at the outputs, all at once; almost always that is all."""
        if not calls[-1].module.depth:
            self.outputs.note(self.context.step)
            self.is_inside = True
        if not self.judge.pending and self._are_finite(calls):
            return
        changed: list[str] = []
        for call in calls:
            if call.is_changed():
                changed.append(call.module.name)
            else:
                self._look(
                    Call(call.module, call.inputs, call.kwargs, call.output, call.before, None), call.stack(), changed
                )

    def _are_finite(self, calls: Sequence[hookd.Call]) -> bool:
        """Say whether all outputs are known to be; a container mostly returns the very tensor that the last module in it did."""
        outputs: list[Tensor] = []
        before = self.seen.tensor()
        for call in calls:
            if call.version < 0:
                outputs += tensors_in(call.output)
            elif call.output is not before:
                before = call.output
                outputs.append(before)
        if not outputs:
            return True
        found = self.context.largest(outputs) if on_host(outputs[-1]) else [math.nan]
        if len(found) > 1 or any(not isinstance(one, float) or not one < INF for one in found):
            return False
        self.seen.note(calls[-1])
        return True

    @hookimpl
    def forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Look at one output, before anything can change what is to go into a bundle; selected for those alone."""
        if not module.depth:
            self.outputs.note(self.context.step)
            self.is_inside = True
        self._look(Call(module, inputs, kwargs, output, versions, self.capture.left(module)), self.context.stack(), [])

    def _look(self, call: Call, stack: tuple[Module, ...], changed: list[str]) -> None:
        """Look at a call by itself.

        Args:
            call: that has returned.
            stack: what was being called, the outermost first.
            changed: names of modules called before, whose outputs nobody knows any more; emptied if this one's is good.
        """
        found = self.scan(tensors_in(call.output), masks=True)
        if self.reporter.is_over:
            self._spread(call.module, found)
        elif found or self.judge.pending:
            self._returned(call, found, stack, changed)
        else:
            changed.clear()  # what was bad before it would most likely be in it

    def _spread(self, module: Module, found: Found) -> None:
        """Count what follows from the origin."""
        if found and isinstance(found, str):
            self.nonfinite.labels(module.name, "output", found).inc()
        elif found:
            self.queue.submit(self._count, self._event("output", module.name), found, masks=self.masks)

    def _returned(self, call: Call, found: Found, stack: tuple[Module, ...], changed: list[str]) -> None:
        """Judge a call whose output is bad, or may be, or that a module in it has left to it."""
        event = self._event("output", call.module.name, self.outputs, stack)
        own = own_tensors(call.module.torch())
        own_found = self.scan(own.values(), masks=True)
        if isinstance(found, str) and isinstance(own_found, str):
            outputs = dict(enumerate(tensors_in(call.output)))
            event.details = self._details(own if found and own_found else outputs)
            event.at = self._place(call)
        inputs_found: Found = self.scan(tensors_in((call.inputs, call.kwargs)), masks=True)
        if inputs_found and call.before and call.before != versions(call.inputs, call.kwargs):
            inputs_found, event.details = "", {**event.details, "inputs": "unknown"}
        if changed:
            event.is_certain, event.details = False, {**event.details, "or_in": list(changed)}
        if self.captures and self.queue.is_known(found, inputs_found, own_found):
            event.call = call
        self.queue.submit(self._judge_call, event, found, inputs_found, own_found, masks=self.masks)

    def _place(self, call: Call) -> int | None:
        """Give how many calls had returned before one, None where that is all."""
        outputs = tensors_in(call.output)
        places = (at for at, one in enumerate(self.context.returned()) if any(one.ref() is x for x in outputs))
        return next(places, None)

    def _judge_call(self, event: Event) -> None:
        self._count(event)
        if event.ends and not event.kind:
            self.recorder.seen.append((event.module, *event.ends))
        origin = self.judge.call(event)
        if origin is not None and origin.where != "output":
            origin.is_certain = True
            origin.details.pop("or_in", None)
        self.reporter.report(origin)

    @hookimpl
    def root_forward(
        self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any, versions: tuple[int, ...]
    ) -> None:
        """Look at what a model gives back in the steps in which its modules are not looked at."""
        self.policy.act()
        state = self.capture.left(module) if self.captures else None
        if state is not None and state.grad:
            self.capture.hold(Call(module, inputs, kwargs, None, versions, state))
        self.gates.note(self.context.step)
        if self.is_inside:
            self.is_inside = False
            return
        found = self.scan(tensors_in(output), masks=True)
        if self.reporter.is_over:
            self._spread(module, found)
        elif found:
            self._gate_hit(Call(module, inputs, kwargs, output, versions, state), found)

    def _gate_hit(self, call: Call, found: Found) -> None:
        """Tell where a bad output of a model comes from: its input, a parameter, or the first call with a bad output."""
        event = self._event("output", call.module.name, self.outputs)
        event.is_certain = call.module.leaf
        inputs_found = self.scan(tensors_in((call.inputs, call.kwargs)), masks=True)
        if isinstance(found, str) and isinstance(inputs_found, str) and not inputs_found:
            event.details = self._details(dict(enumerate(tensors_in(call.output))))
            if not self.gradients.blame_parameter(event, call.module, self.gates.since(event.step)):
                trace.back(event, self.context.returned(), self.scan)
        if self.captures and self.queue.is_known(found, inputs_found):
            event.call = call
        self.queue.submit(self._judge_gate, event, found, inputs_found, masks=self.masks)

    def _judge_gate(self, event: Event) -> None:
        self._count(event)
        self.reporter.report(self.judge.root(event))

    @hookimpl
    def forward_error(self, module: Module) -> None:
        """Forget the call that waits for its caller's judgement: the caller will not return."""
        self.capture.left(module)
        self.judge.pending.pop(get_ident(), None)
        if not module.depth:
            self.is_inside = False

    # -- backward

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Note in which order the gradients reached the modules; of a container, look at what reached it."""
        self.order += 1
        self.reached[module.id] = self.order
        if not module.depth:
            self.backwards.note(self.context.step)
            if self.captures:
                self.capture.reached(module, grad_output)
        if not module.leaf and not self.reporter.is_over:
            self._look_at_gradient(module, grad_output, grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Look at the gradient that leaves the module; if none does, or if it is bad, at the one that reached it."""
        if not self.reporter.is_over:  # what is bad later follows from the origin; the outputs show how far it spread
            self._look_at_gradient(module, grad_input, grad_output)

    def _look_at_gradient(self, module: Module, leaves: tuple[Any, ...], reached: tuple[Any, ...]) -> None:
        found = self.scan(tensors_in(leaves) or tensors_in(reached))
        if found:
            event = self._event("grad", module.name, self.backwards)
            event.reached = self.reached.get(module.id, 0)
            reached_found = self.scan(tensors_in(reached))
            if self.captures and self.queue.is_known(found, reached_found):
                event.call = self.capture.held()
            self.queue.submit(self._judge_gradient, event, found, reached_found)

    def _judge_gradient(self, event: Event) -> None:
        """Order a module that a bad gradient reached by its arrival, and one that made it by when it was noticed.

        Of a container and a module in it, the container was reached first.
        """
        if event.inputs:
            event.order = event.reached
        if event.kind:
            self.undecided.append(event)
            self.judge.gradient(event)

    # -- loss

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Look at what a backward starts from, and at what became of the gradients of the one before."""
        self.recorder.loss(tensors)
        self.gates.note(self.context.step)
        self.scaled = any(getattr(t, "grad_fn", None).__class__.__name__ == "MulBackward0" for t in tensors_in(tensors))
        found = self.scan(tensors_in(tensors))
        cleared = (self.judge.suspect is not None or bool(self.queue.entries)) and self._is_cleared()
        if found or cleared:
            event = self._event("loss", "", self.gates)
            self.queue.submit(lambda event: self._judge_loss(event, cleared=cleared), event, found)

    def _judge_loss(self, event: Event, *, cleared: bool) -> None:
        self._count(event)
        skipped = self.judge.skipped
        self.reporter.report(self.judge.loss(event, cleared=cleared))
        self._skipped(self.judge.skipped - skipped)

    def _is_cleared(self) -> bool:
        """Say whether no bad gradient is left over: else the gradients are still being accumulated."""
        grads = self.gradients.of(None)
        return not grads if self.queue.entries else not self.scan.many(grads)

    @hookimpl
    def loss_done(self) -> None:
        """Look at the parameters' gradients where no optimizer step may follow (GradScaler) or runs already (LBFGS)."""
        if self.stepping is not None:
            self._judge_step(self.stepping, self.scan.many(self.gradients.of(self.stepping)))
        elif self.scaled and self.judge.suspect is None:
            self._judge_gradients(self.judge.gradient, None, self.scan.many(self.gradients.of(None)))

    # -- the step

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Look at the gradients that are about to be used: reduced over ranks, accumulated and unscaled."""
        with torch.no_grad():  # with a policy this hook is a mutator's, for whom nothing is switched off
            found = self.scan.many(self.gradients.of(optimizer))
            self.is_skipping = self.policy.may_skip(optimizer) and is_bad(found)
            self._judge_step(optimizer, found)
        if self.is_skipping:
            self.policy.skip(optimizer)
        self.recorder.step(optimizer, self.scan.largest)
        self.stepping = optimizer

    def _judge_step(self, optimizer: Optimizer, found: Found) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
        self._judge_gradients(self._decide, optimizer, found, flag)

    def _judge_gradients(
        self, judge: Callable[[Event], None], optimizer: Optimizer | None, found: Found, flag: Iterable[Tensor] = ()
    ) -> None:
        """Judge what was found in the gradients of all parameters, or of those that an optimizer holds."""
        event = self._event("grad", "")
        event.is_certain = self.backwards.latest == event.step
        if found and isinstance(found, str):
            self.gradients.blame(event, optimizer)
            event.call = self.capture.held()
        self.queue.submit(judge, event, found, self.scan(flag))

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `inputs` says whether a fused optimizer was told to skip it."""
        skipped = self.judge.skipped
        is_used = bool(event.kind) and not event.inputs
        if is_used:
            for bad in self.undecided or [event]:
                self._count(bad)
        self.undecided.clear()
        self.reporter.report(self.judge.step(event, found_inf=bool(event.inputs)))
        self._skipped(self.judge.skipped - skipped)
        if is_used and not self.is_skipping:
            self.reporter.gradients_used()

    def _skipped(self, steps: int) -> None:
        if steps:
            self.skipped.inc(steps)
            self.undecided.clear()

    @hookimpl
    def step_post(self) -> None:
        """End the step: what is on a device is sent on its way, and what has arrived is judged."""
        self.stepping = None
        self.judge.pending.clear()
        self.capture.let_go()
        self.queue.flush()

    @hookimpl
    def unconfigure(self) -> None:
        """Keep nothing of the training's."""
        self.capture.let_go()

    # -- what all of them use

    def _event(
        self, where: str, module: str, looks: Looks | None = None, inside: tuple[Module, ...] | None = None
    ) -> Event:
        """Describe what is seen now; `looks` tells since when it may have been there, None: it was made now."""
        step, stack = self.context.step, tuple(m.name for m in (self.context.stack() if inside is None else inside))
        since = step if looks is None else looks.since(step)
        self.order += 1
        return Event(where, "", module, step, stack, thread=get_ident(), order=self.order, since=since)

    def _details(self, candidates: Mapping[Any, Tensor]) -> dict[str, Any]:
        """Count what is bad in the first tensor in which something is."""
        for name, tensor in candidates.items():
            if self.scan([tensor], masks=True):
                return {**({"parameter": name} if isinstance(name, str) else {}), **self.scan.counts(tensor)}
        return {}

    def _count(self, event: Event) -> None:
        if event.kind:
            self.nonfinite.labels(event.module, event.where, event.kind).inc()
