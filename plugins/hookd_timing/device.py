"""What a CUDA device takes for a module's forward and backward, by events in its stream. Runs in the target.

Events come from a pool and are read at the ends of later steps, once they are over: nothing ever waits for the device.
Only sampled steps have events, for recording one costs some microseconds, which the device waits for where the training
keeps it waiting anyway.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd import of_tensor, parameters_in, tensors

if TYPE_CHECKING:
    from hookd import Context, Counter, Module

is_in_use: Any = torch.cuda.is_initialized
may_be_in_use: Any = torch.backends.cuda.is_built
"""Whether this torch can use a device at all; asking for a device would initialise it."""
new_event: Any = torch.cuda.Event
DIRECTIONS = 2
"""Forwards are timed in one sampled step, backwards in the next."""
MOST_PENDING = 8192
"""Spans that are not over; a device so far behind is measured no further until it has caught up."""


class Span(NamedTuple):
    """A beginning that waits for its end."""

    number: int
    stream: Any
    start: Any


class Calls(threading.local):
    """The sampled calls that the calling thread is inside of."""

    def __init__(self) -> None:
        self.spans: list[Span] = []


class Turns:
    """Whose turn it is in a step in which calls are timed: the modules of one depth, so that no span has events inside.

    Left out are steps in which other plugins look, for what they launch would lie inside, and the first one: kernels are
    loaded in it. What is measured stands for the other turns as well, and for what was left out before.

    Args:
        every: in one of so many sampled steps they are timed.
    """

    def __init__(self, context: Context, every: int) -> None:
        self._context, self._every = context, every
        self._step = 0
        self._steps = 0  # that a turn in it would stand for
        self._depth = -1  # of the modules whose turn it is in that step; -1: nobody's
        self._has_measured = False
        self._met: set[int] = set()  # the depths at which modules were called in it
        self._depths = 0  # so many take turns
        self._owed: dict[int, int] = {}  # by depth: steps that no call has stood for; below 0: some have in advance
        self._turns: dict[int, int] = {}  # by depth: the number of its last turn

    def meet(self, depth: int) -> bool:
        """Note a call in the step in progress, and say whether it is to be measured."""
        if self._context.step != self._step:
            self._begin_step()
        self._met.add(depth)
        return depth == self._depth

    def weight(self) -> int:
        """Return how many steps a call stands for that was measured just now."""
        self._has_measured = True
        return max(0, self._owed.get(self._depth, 0) + self._steps * self._depths)

    def _begin_step(self) -> None:
        for depth in self._met:
            stood_for = self.weight() if self._has_measured and depth == self._depth else 0
            self._owed[depth] = self._owed.get(depth, 0) + self._steps - stood_for
        waiting, self._depth = sorted(self._met, key=lambda depth: (self._turns.get(depth, 0), depth)), -1
        if waiting and self._context.is_alone:
            self._depth = waiting[0]
            self._turns[self._depth] = max(self._turns.values(), default=0) + 1
        self._depths = len(waiting)
        self._step, self._steps = self._context.step, self._context.interval * self._every
        self._has_measured = False
        self._met.clear()


class Device:
    """Times spans of a stream.

    Forwards, backwards and models as a whole have steps of their own, for what timing one of them takes of the host keeps
    the device waiting in the others: hooks on the graph most of all.

    Attributes:
        is_forward: in the next sampled step forward calls are timed, and no graph is hooked; else backwards are.
        is_root: a model as a whole is to be timed in the next step in which nobody looks at its modules.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._of_forward = _family(context, "forward")
        self._of_backward = _family(context, "backward")
        self._calls = Calls()
        self._forwards, self._backwards = Turns(context, DIRECTIONS), Turns(context, DIRECTIONS)
        self._open: dict[int, list[Span]] = {}  # backwards, by module
        self._seen: dict[int, torch.device] = {}  # where modules have run
        self._roots: dict[int, Span] = {}
        self._steps, self._last_step = 0, 0  # that were seen, and the last one's number, which may come to be absolute
        self._timed_roots: dict[int, int] = {}  # in the step in progress: until which of them a call is to stand for it
        self._stood_for: dict[int, int] = {}  # until which of them calls of a root have stood for it
        self._pending: deque[tuple[Span, Any, Any, int]] = deque()
        self._free: defaultdict[torch.device, list[Any]] = defaultdict(list)  # events, by where they were recorded
        self._sampled_step = 0
        self.is_forward = self.is_root = False

    @property
    def is_sampled(self) -> bool:
        """Whether modules were called in the step in progress, and it is sampled."""
        return self._context.step == self._sampled_step

    def note_sampled(self) -> None:
        """Note that the step in progress is sampled."""
        self._sampled_step = self._context.step

    def begin_forward(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the beginning of a sampled call, if it is on a device."""
        if module.depth == 0:
            self._calls.spans.clear()  # of calls that an exception has ended
            if (device := device_of(module, inputs, kwargs)) is not None:
                self._seen[module.id] = device  # it is timed as a whole
                self._stood_for.setdefault(module.id, self._steps)
            return
        if not self._forwards.meet(module.depth) or len(self._pending) >= MOST_PENDING:
            return
        device = device_of(module, inputs, kwargs)
        if device is not None:
            self._seen[module.id] = device
            self._calls.spans.append(self._begin(module, torch.cuda.current_stream(device)))

    def end_forward(self, module: Module) -> None:
        """Mark the end of a call, if its beginning was marked."""
        spans = self._calls.spans
        if not any(span.number == module.id for span in spans):
            return  # its beginning was not marked: those of what it is in stay
        while (span := spans.pop()).number != module.id:
            pass  # of a call that an exception has ended
        self._end(span, self._of_forward.labels(module.name), self._forwards.weight())

    def begin_root(self, module: Module) -> None:
        """Mark the beginning of a model's call, where that is to be timed and nobody looks at its modules."""
        device = self._seen.get(module.id)
        is_watched = self.is_sampled and self._context.interval > 1
        if device is not None and not is_watched and self._context.is_alone and len(self._pending) < MOST_PENDING:
            self._roots[module.id] = self._begin(module, torch.cuda.current_stream(device))

    def end_root(self, module: Module) -> None:
        """Mark its end, if its beginning was marked."""
        span = self._roots.pop(module.id, None)
        if span is not None:
            until = self._steps + DIRECTIONS * self._context.interval
            self._end(span, self._of_forward.labels(module.name), max(0, until - self._stood_for[module.id]))
            self._timed_roots[module.id] = until

    def begin_backward(self, module: Module) -> None:
        """Mark the beginning of the backward of a call that was on a device, in the stream that the engine has set."""
        if module.id in self._seen and self._backwards.meet(module.depth) and len(self._pending) < MOST_PENDING:
            span = self._begin(module, torch.cuda.current_stream())
            self._open.setdefault(module.id, []).append(span)

    def end_backward(self, module: Module) -> None:
        """Mark its end."""
        spans = self._open.get(module.id)
        if spans:
            self._end(spans.pop(), self._of_backward.labels(module.name), self._backwards.weight())

    def _begin(self, module: Module, stream: Any) -> Span:
        start = self._event(stream)
        start.record(stream)
        return Span(module.id, stream, start)

    def _end(self, span: Span, seconds: Any, weight: int) -> None:
        stop = self._event(span.stream)
        stop.record(span.stream)
        self._pending.append((span, stop, seconds, weight))

    def _event(self, stream: Any) -> Any:
        """Give an event of the stream's device: torch records none on two devices."""
        free = self._free[stream.device]
        return free.pop() if free else new_event(enable_timing=True)

    def step_done(self) -> None:
        """End a step: read what is over, and decide what is timed next."""
        self._read()
        if self._context.step == self._last_step:  # of another optimizer's
            return
        self._last_step, self._steps = self._context.step, self._steps + 1
        self._open.clear()
        if self._timed_roots:
            # Of a model that is called several times in a step, each call has stood for as many.
            for number, until in self._timed_roots.items():
                self._stood_for[number] = max(self._stood_for.get(number, 0), until)
            self._timed_roots.clear()
            self.is_root = False
        if self.is_sampled:
            self.is_root = self.is_root or self.is_forward
            self.is_forward = not self.is_forward

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            span, stop, seconds, weight = self._pending.popleft()
            # In milliseconds; both are over, so it does not wait.
            seconds.inc(span.start.elapsed_time(stop) * 1e-3 * weight)
            self._free[span.stream.device] += (span.start, stop)


def _family(context: Context, direction: str) -> Counter:
    text = f"Time of the device for the module's {direction}, children included, estimated from sampled steps."
    return context.counter(f"{direction}_device_seconds", text, ["module"])


def device_of(module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the CUDA device that a call is on: that of its first input, else of the module's first parameter."""
    tensor = next(iter(tensors((inputs, kwargs))), None)
    if tensor is None:
        own = module.torch()
        tensor = next((parameter for _, parameter in parameters_in(own)), None) if own is not None else None
    return of_tensor(tensor, "device") if tensor is not None and of_tensor(tensor, "is_cuda") else None
