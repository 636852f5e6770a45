"""Where the first NaN or infinity was born: module, place and step. Runs in the target.

    hookd_nan_nonfinite_total{module,where,kind}   tensors seen with a NaN (kind nan) or else an infinity (inf)
    hookd_nan_origin{module,where,kind}            1 for the place where the first one was born
    hookd_nan_first_step                           the step in which that was
    hookd_nan_amp_skipped_steps_total              steps that a GradScaler skipped because the gradients overflowed

How the origin is found. A module call whose output is bad, though its inputs and its own parameters are not, made the
bad value itself: a container too, whose own code or hook did it. If one of its own parameters is bad, that is named.
If its inputs were bad already, the module that called it decides when it returns, and at the outermost call the input
of the model is to blame. In a backward, the first bad gradient in the order of execution is the origin; a bad loss
after good outputs has no module. What follows from the origin is counted, but not reported again.

Gradients under a GradScaler overflow on purpose. So a bad gradient is only a suspect until it is known what became of
it: an optimizer step about to use it makes it an origin; a fused optimizer told of `found_inf`, or gradients that were
cleared before any step used them, make it a skipped step. After `amp_patience` skipped steps in a row it is reported
after all: no scale is that large. (Code that throws bad gradients away by itself looks the same, and is treated so.)

`-inf` alone in outputs, inputs and parameters is no finding unless `neginf=true`: attention masks are made of it.

Limits: a module that writes a NaN into its own input in place is reported as the module that called it, and so is, in
the first steps after an attach, one that is not observed yet: a deep model is learnt over some steps, parents first.
What a module on a GPU made is known a step or two later, with its exact step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, Callable, Union

import torch
from torch import Tensor

from hookd import Context, Module, Plugin, PluginError, hookimpl
from hookd import tensors as tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.optim import Optimizer

Range = tuple[Tensor, Tensor]  # minimum and maximum, 0-dim
Found = Union[str, list[Range]]  # "" (nothing bad), "inf" or "nan"; on a device the ranges, to be read later
INF = math.inf
STRIDED = torch.strided
REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN = frozenset((Tensor, torch.nn.Parameter))
SPARSE = frozenset(getattr(torch, name, None) for name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"))
QUEUE_LIMIT = 1024


class NaN(Plugin):
    """Looks at every output, every gradient that flows and every loss, and names the first that is not finite."""

    name = "nan"
    sampled = ("forward", "backward_pre", "backward")
    every = 1
    longest = 1  # a NaN that lives one step must not be missed: the governor leaves this alone

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options `neginf` and `amp_patience`, and declare the metrics."""
        self.context = context
        self.neginf = context.option("neginf", default=False)
        patience = context.option("amp_patience", 30)
        if patience < 1:
            raise PluginError(f"nan: amp_patience must be at least 1, not {patience}")
        labels = ["module", "where", "kind"]
        self.nonfinite = context.counter("nonfinite", "Tensors seen with a NaN or else an infinity.", labels)
        self.origin = context.gauge("origin", "1 for the place where the first NaN or infinity was born.", labels)
        self.first_step = context.gauge("first_step", "Step in which the first NaN or infinity was born.")
        self.skipped = context.counter("amp_skipped_steps", "Optimizer steps skipped for overflowed gradients.")
        self.skipped.inc(0)  # so that the series is there from the start
        self.judge = Judge(patience)
        self.found = False  # an origin was reported
        self.stepping: Optimizer | None = None
        self.scaled = False  # the last loss looked like one that a GradScaler scaled
        self.order = 0
        self.reached: dict[int, int] = {}  # by module.id: when in that order a gradient last reached it
        self.undecided: list[Event] = []  # bad gradients, not counted until it is known what becomes of them
        self.checked = (0, 0)  # the last two steps whose forward was looked at
        self.queue: list[Entry] = []  # what is not known yet, for its tensors are on a device
        self.later = Later()

    @hookimpl
    def forward(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Look at the output; almost always that is all."""
        if module.depth == 0 and self.context.step != self.checked[1]:
            self.checked = (self.checked[1], self.context.step)
        found = self._scan(tensors_in(output), masks=True)
        if self.found:
            self._spread(module, found)
        elif found or self.judge.pending:
            self._returned(module, found, tensors_in(output), tensors_in((inputs, kwargs)))

    def _spread(self, module: Module, found: Found) -> None:
        """Count what follows from the origin."""
        if found and isinstance(found, str):
            self.nonfinite.labels(module.name, "output", found).inc()
        elif found:
            self._submit(self._count, self._event("output", module.name), found)

    def _returned(self, module: Module, found: Found, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        event = self._event("output", module.name)
        own = own_tensors(module.torch())
        own_found = self._scan(own.values(), masks=True)
        if isinstance(found, str) and isinstance(own_found, str):
            event.details = self._details(own if found and own_found else dict(enumerate(outputs)))
        self._submit(self._judge_call, event, found, self._scan(inputs, masks=True), own_found)

    def _details(self, candidates: Mapping[Any, Tensor]) -> dict[str, Any]:
        """Count what is bad in the first tensor in which something is."""
        for name, tensor in candidates.items():
            if self._scan([tensor], masks=True):
                return {"parameter": name, **counts(tensor)} if isinstance(name, str) else counts(tensor)
        return {}

    def _judge_call(self, event: Event) -> None:
        self._count(event)
        self._report(self.judge.call(event))

    @hookimpl
    def forward_error(self, module: Module) -> None:  # noqa: ARG002
        """Forget the call that waits for its caller's judgement: the caller will not return."""
        self.judge.pending.pop(get_ident(), None)

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Want every module; what leaves a container is seen when it leaves the first module in it, at less cost."""
        hooks = {"forward", "forward_error", "backward_pre", "backward"}
        return hooks if module.leaf else hooks - {"backward"}

    @hookimpl
    def backward_pre(self, module: Module, grad_output: tuple[Any, ...]) -> None:
        """Note in which order the gradients reached the modules; of a container, look at what reached it."""
        self.order += 1
        self.reached[module.id] = self.order
        if not module.leaf and not self.found:
            self._look_at_gradient(module, grad_output, grad_output)

    @hookimpl
    def backward(self, module: Module, grad_input: tuple[Any, ...], grad_output: tuple[Any, ...]) -> None:
        """Look at the gradient that leaves the module; if none does, or if it is bad, at the one that reached it."""
        if not self.found:  # whatever is bad later follows from the origin, and the outputs show how far it has spread
            self._look_at_gradient(module, grad_input, grad_output)

    def _look_at_gradient(self, module: Module, leaves: tuple[Any, ...], reached: tuple[Any, ...]) -> None:
        found = self._scan(tensors_in(leaves) or tensors_in(reached))
        if found:
            event = self._event("grad", module.name)
            event.reached = self.reached.get(module.id, 0)
            self._submit(self._judge_gradient, event, found, self._scan(tensors_in(reached)))

    def _judge_gradient(self, event: Event) -> None:
        """Order a module that a bad gradient reached by its arrival, and one that made it by when it was noticed.

        Of a container and a module in it, the container was reached first.
        """
        if event.inputs:
            event.order = event.reached
        if event.kind:
            self.undecided.append(event)
            self.judge.gradient(event)

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Look at what a backward starts from, and at what became of the gradients of the one before."""
        self.scaled = any(getattr(t, "grad_fn", None).__class__.__name__ == "MulBackward0" for t in tensors_in(tensors))
        found = self._scan(tensors_in(tensors))
        cleared = (self.judge.suspect is not None or bool(self.queue)) and self._is_cleared()
        if found or cleared:
            self._submit(lambda event: self._judge_loss(event, cleared=cleared), self._event("loss", ""), found)

    def _judge_loss(self, event: Event, *, cleared: bool) -> None:
        self._count(event)
        skipped = self.judge.skipped
        self._report(self.judge.loss(event, cleared=cleared))
        self._skipped(self.judge.skipped - skipped)

    def _is_cleared(self) -> bool:
        """Say whether no bad gradient is left over: else the gradients are still being accumulated."""
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        return not grads if self.queue else not self._scan(grads)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for root in self.context.roots():
            model = root.torch()
            if model is not None:
                yield from model.parameters()

    @hookimpl
    def loss_done(self) -> None:
        """Look at the parameters' gradients where no optimizer step may follow (GradScaler) or runs already (LBFGS)."""
        if self.stepping is not None:
            self._judge_step(self.stepping)
        elif self.scaled and self.judge.suspect is None:
            grads = [p.grad for p in self._parameters() if p.grad is not None]
            self._submit(self.judge.gradient, self._event("grad", ""), self._scan(grads))

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Look at the gradients that are about to be used: reduced over ranks, accumulated and unscaled."""
        self._judge_step(optimizer)
        self.stepping = optimizer

    def _judge_step(self, optimizer: Optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found, found_inf = self._scan(grads), getattr(optimizer, "found_inf", None)
        event = self._event("grad", "")
        if found and isinstance(found, str):
            event.where, event.module, event.details = self._blame(optimizer)
        flag = [] if found_inf is None else [torch.where(found_inf > 0, INF, 0.0)]
        self._submit(self._decide, event, found, self._scan(flag))

    def _blame(self, optimizer: Optimizer) -> tuple[str, str, dict[str, Any]]:
        """Find the last bad gradient in the model's order, which is the first of the backward."""
        grads = ((n, p, p.grad) for n, p in self.context.ordered_parameters(optimizer) if p.grad is not None)
        name, parameter, grad = [found for found in grads if self._scan([found[2]])][-1]
        owner, _, own_name = name.rpartition(".")
        if owner.startswith("#") or not owner:
            owner = f"{owner}.(root)".lstrip(".")
        where, tensor = ("param", parameter) if self._scan([parameter]) else ("grad", grad)
        return where, owner, {"parameter": own_name, **counts(tensor)}

    def _decide(self, event: Event) -> None:
        """Judge the gradients at a step; `inputs` says whether a fused optimizer was told to skip it."""
        skipped = self.judge.skipped
        if event.kind and not event.inputs:
            for bad in self.undecided or [event]:
                self._count(bad)
        self.undecided.clear()
        self._report(self.judge.step(event, found_inf=bool(event.inputs)))
        self._skipped(self.judge.skipped - skipped)

    def _skipped(self, steps: int) -> None:
        if steps:
            self.skipped.inc(steps)
            self.undecided.clear()

    @hookimpl
    def step_post(self) -> None:
        """End the step: what is on a device is sent on its way, and what has arrived is judged."""
        self.stepping = None
        self.judge.pending.clear()
        self._flush()

    # -- from an event to a judgement, now or later

    def _scan(self, found: Iterable[Tensor], *, masks: bool = False) -> Found:
        """Look for NaN and infinity in one pass over each tensor: NaN reaches both ends of aminmax.

        Unlike a sum, the range of finite numbers cannot overflow, so it raises no false alarm. `masks`: `-inf` alone
        is none of our business.
        """
        worst, ranges = "", []
        masks = masks and not self.neginf
        for tensor in found:
            real = plain(tensor)
            if real is not None:
                low, high = torch.aminmax(dense(real))
                if on_host(real):
                    worst = max(worst, kind_of(low.item(), high.item(), masks=masks))
                else:
                    ranges.append((high if masks else low, high))
        return worst or ranges or ""

    def _event(self, where: str, module: str) -> Event:
        stack = tuple(m.name for m in self.context.stack())
        self.order += 1
        return Event(
            where, "", module, self.context.step, stack, thread=get_ident(), order=self.order, checked=self.checked
        )

    def _submit(self, judge: Callable[[Event], None], event: Event, *found: Found) -> None:
        """Have an event judged: at once if all is known and nothing before it is waiting."""
        entry = Entry(judge, event, found)
        if self.queue or self.later.waiting or not entry.is_known:
            self.queue.append(entry)
            if len(self.queue) >= QUEUE_LIMIT:
                self._flush()
        else:
            entry.judge(iter(()))

    def _flush(self) -> None:
        if self.queue:
            self.later.put([end for entry in self.queue for pair in entry.ranges for end in pair], self.queue)
            self.queue = []
        for numbers, entries in self.later.take():
            values = iter(numbers)
            for entry in entries:
                entry.judge(values)

    def _count(self, event: Event) -> None:
        if event.kind:
            self.nonfinite.labels(event.module, event.where, event.kind).inc()

    def _report(self, event: Event | None) -> None:
        """Report the first origin, once."""
        if event is None or self.found:
            return
        self.found = True
        self.origin.labels(event.module, event.where, event.kind).set(1)
        self.first_step.set(event.step)
        message, fields = describe(event, is_step_absolute=self.context.is_step_absolute)
        self.context.incident(event.kind, message, **fields)


# -- tensors


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


def is_nested(tensor: Tensor) -> bool:
    """Whether it is a nested tensor; torch 1.11 has none."""
    return getattr(tensor, "is_nested", False)


def plain(tensor: Tensor) -> Tensor | None:
    """Give the real floating-point numbers of any tensor, as a view where that is possible.

    Returns:
        None where there are none: integers, empty, meta, quantized and unknown kinds of tensors.
    """
    if type(tensor) in PLAIN and tensor.dtype in REAL and tensor.layout is STRIDED and not is_nested(tensor):
        return tensor if tensor.numel() and not tensor.is_meta else None  # nearly all there are, quickly
    if is_nested(tensor) or tensor.layout in SPARSE:
        tensor = tensor.values()
    if type(tensor) not in PLAIN:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # a DTensor: reducing it as a whole would talk to other ranks
        elif hasattr(tensor, "__tensor_flatten__"):
            return None  # made of other tensors, in a way that only its own class knows
        else:
            tensor = tensor.as_subclass(Tensor)
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor._values()  # noqa: SLF001 - values() would want it coalesced first
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != STRIDED or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    return tensor if tensor.dtype in REAL else tensor.float()  # float8 has no reductions


def dense(tensor: Tensor) -> Tensor:
    """Order the dimensions as they lie in memory: reducing a transposed tensor as it is takes 12 times as long."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def own_tensors(module: torch.nn.Module | None) -> dict[str, Tensor]:
    """Give the parameters and buffers that `module` itself owns."""
    if module is None:
        return {}
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Judge a range of which aminmax made both ends NaN if there is one: "nan", "inf" or ""."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def counts(tensor: Tensor) -> dict[str, Any]:
    """Count exactly; only ever called for the one tensor of an incident."""
    real = plain(tensor)
    if real is None:
        return {}
    return {
        "nan_count": int(real.isnan().sum()),
        "inf_count": int(real.isinf().sum()),
        "elements": real.numel(),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).replace("torch.", ""),
    }


class Later:
    """Reads 0-dim tensors of a device without waiting for it: they are asked for now, and taken when they are there."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Tensor, Any, Any]] = deque()

    def put(self, values: list[Tensor], note: Any) -> None:
        """Send `values`, which may lie on several devices, on their way; `note` comes back with them."""
        stacked = torch.stack([v.to(values[0].device, torch.float32, non_blocking=True) for v in values])
        if not stacked.is_cuda:
            self.waiting.append((stacked, None, note))
            return
        with torch.cuda.device(stacked.device):
            host = torch.empty(stacked.shape, pin_memory=True).copy_(stacked, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.waiting.append((host, event, note))

    def take(self) -> Iterator[tuple[list[float], Any]]:
        """Give what has arrived, in the order in which it was asked for; the newest stays until the next time."""
        while len(self.waiting) > 1 and (self.waiting[0][1] is None or self.waiting[0][1].query()):
            host, _, note = self.waiting.popleft()
            yield host.tolist(), note


# -- judgement: no tensor from here on


@dataclass
class Event:
    """What was seen at one place; `kind` and `inputs` are "", "inf" or "nan".

    `order` counts up with the events; of a module's gradient, `inputs` is that of its output, and `reached` the order
    in which that arrived.
    """

    where: str
    kind: str
    module: str
    step: int
    stack: tuple[str, ...] = ()
    inputs: str = ""
    thread: int = 0
    order: int = 0
    reached: int = 0
    checked: tuple[int, int] = (0, 0)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Entry:
    """An event whose kind may not be known yet, and the function that is to judge it.

    `found` is what was found in the event's own tensors, in its inputs and in the module's own parameters.
    """

    judge_with: Callable[[Event], None]
    event: Event
    found: tuple[Found, ...]

    @property
    def ranges(self) -> list[Range]:
        """What must be read from a device before the event can be judged."""
        return [one for found in self.found if isinstance(found, list) for one in found]

    @property
    def is_known(self) -> bool:
        """Whether nothing is on a device."""
        return all(isinstance(found, str) for found in self.found)

    def judge(self, values: Iterator[float]) -> None:
        """Judge the event; `values` goes on with the minima and maxima of its ranges."""
        kinds = [
            found if isinstance(found, str) else max(kind_of(next(values), next(values)) for _ in found)
            for found in self.found
        ]
        self.event.kind = kinds[0]
        self.event.inputs = kinds[1] if len(kinds) > 1 else ""
        if kinds[0] and len(kinds) > 2 and kinds[2]:
            self.event.where = "param"
        self.judge_with(self.event)


class Judge:
    """Finds the origin in a sequence of events, which it is given in the order of execution.

    Each method returns the event that is the origin, with `where` and `module` as they are to be reported, or None.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.pending: dict[int, Event] = {}  # per thread: a call with bad inputs, whose caller is to decide
        self.suspect: Event | None = None  # the first bad gradient since gradients were last known to be good
        self.skipped = 0
        self.in_a_row = 0

    def call(self, event: Event) -> Event | None:
        """Judge a module call that has returned; `where` is "output", or "param" where one of its own is bad."""
        waiting = self.pending.get(event.thread)
        if waiting is not None and len(event.stack) < len(waiting.stack):
            del self.pending[event.thread]
            if not event.inputs and not event.kind:
                # Made between the two calls, and taken away again before the outer one returned.
                return replace(waiting, where="input", details={})
            event.kind = event.kind or waiting.kind
        if not event.kind:
            return None
        if event.where == "param" or not event.inputs:
            return event
        if len(event.stack) <= 1:
            return replace(event, where="input", kind=event.inputs, details={})
        self.pending[event.thread] = event
        return None

    def gradient(self, event: Event) -> None:
        """Keep the first bad gradient until it is known what becomes of it."""
        if event.kind and (self.suspect is None or event.order < self.suspect.order):
            self.suspect = event

    def loss(self, event: Event, *, cleared: bool) -> Event | None:
        """Judge the start of a backward; `cleared`: no bad gradient of an earlier one is left."""
        origin = self._skip() if self.suspect is not None and cleared else None
        return origin or (event if event.kind else None)

    def step(self, event: Event, *, found_inf: bool) -> Event | None:
        """Judge the gradients that an optimizer is about to use or, with `found_inf`, to throw away."""
        if found_inf:
            self.gradient(event)
            return self._skip()
        suspect, self.suspect, self.in_a_row = self.suspect, None, 0
        if not event.kind:
            return None
        return suspect if suspect is not None and suspect.module else event

    def _skip(self) -> Event | None:
        suspect, self.suspect = self.suspect, None
        self.skipped += 1
        self.in_a_row += 1
        return suspect if self.in_a_row >= self.patience else None


def describe(event: Event, *, is_step_absolute: bool) -> tuple[str, dict[str, Any]]:
    """Say what happened, for a person and for a machine."""
    before, latest = event.checked
    if latest != event.step:
        before = latest
    is_exact = before == event.step - 1 and (before > 0 or is_step_absolute)
    name = {"nan": "NaN", "inf": "Inf"}[event.kind]
    parameter = event.details.get("parameter", "")
    words = {"param": f"parameter {parameter}", "grad": f"gradient {parameter}"}.get(event.where, event.where)
    message = f"first {name}: {event.module} {words}".replace("  ", " ").rstrip() + f" at step {event.step}"
    if not is_step_absolute:
        message += " (counted from the attach)"
    if not is_exact:
        message += f"; steps after {before} were not looked at" if before else "; it may be older than that"
    fields = {
        "step": event.step,
        "module": event.module,
        "where": event.where,
        "is_exact": is_exact,
        "stack": list(event.stack),
    }
    return message, {**fields, **event.details}
