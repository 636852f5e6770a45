"""Measure the time of a device for a module's forward and backward, by events in its stream.

Events come from a pool and are read at the ends of later steps, once they are over: nothing ever waits for the device.
Only sampled steps have events, because recording one takes some microseconds of the host, and the device waits for them
if the training is bound by the host.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd import accelerator_of, accelerators, of_tensor, parameters_in, tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hookd import Context, Counter, Module

DIRECTIONS = 2
"""Forwards are timed in one sampled step, backwards in the next."""
MOST_PENDING = 8192
"""Spans that may be pending; a device further behind is not measured until it has caught up."""


class Span(NamedTuple):
    """A span that has begun and waits for its end."""

    number: int
    stream: Any
    start: Any


class Calls(threading.local):
    """The sampled calls that the calling thread is inside of."""

    def __init__(self) -> None:
        self.spans: list[Span] = []


class Rotation:
    """Selects the depth whose modules are timed in a step; all others wait, so that no span has events inside.

    No depth has a turn in steps that other plugins sample, because their launches would lie inside the spans, nor in
    the first step, which loads kernels. A measured call also represents the other turns, and the steps left out before.

    Args:
        every: one sampled step in so many has a turn.
    """

    def __init__(self, context: Context, every: int) -> None:
        self._context, self._every = context, every
        self._step = 0
        self._steps = 0  # steps that a turn in it would represent
        self._depth = -1  # of the modules whose turn it is in that step; -1: none
        self._has_measured = False
        self._met: set[int] = set()  # the depths at which modules were called in it
        self._depths = 0  # how many depths take turns
        self._owed: dict[int, int] = {}  # by depth: steps not represented yet; below 0: in advance
        self._last_turn: dict[int, int] = {}  # by depth: the number of its last turn

    def meet(self, depth: int) -> bool:
        """Note a call in the step in progress, and return whether to measure it."""
        if self._context.step != self._step:
            self._begin_step()
        self._met.add(depth)
        return depth == self._depth

    def weight(self) -> int:
        """Return how many steps the call represents that was just measured."""
        self._has_measured = True
        return max(0, self._owed.get(self._depth, 0) + self._steps * self._depths)

    def _begin_step(self) -> None:
        for depth in self._met:
            represented = self.weight() if self._has_measured and depth == self._depth else 0
            self._owed[depth] = self._owed.get(depth, 0) + self._steps - represented
        waiting, self._depth = sorted(self._met, key=lambda depth: (self._last_turn.get(depth, 0), depth)), -1
        if waiting and self._context.is_alone:
            self._depth = waiting[0]
            self._last_turn[self._depth] = max(self._last_turn.values(), default=0) + 1
        self._depths = len(waiting)
        self._step, self._steps = self._context.step, self._context.interval * self._every
        self._has_measured = False
        self._met.clear()


class Device:
    """Times spans of a stream.

    Forwards, backwards and whole models are timed in different steps: timing one of them takes time on the host, most
    of all the hooks on the graph, and that would keep the device waiting in the others.

    Attributes:
        is_forward: the next sampled step times forward calls, and hooks no graph; otherwise it times backwards.
        is_root: the next step in which no plugin samples the modules times whole models.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._of_forward = _family(context, "forward")
        self._of_backward = _family(context, "backward")
        self._calls = Calls()
        self._forwards, self._backwards = Rotation(context, DIRECTIONS), Rotation(context, DIRECTIONS)
        self._open: dict[int, list[Span]] = {}  # backwards, by module
        self._seen: dict[int, torch.device] = {}  # where modules have run
        self._roots: dict[int, Span] = {}
        self._steps, self._last_step = 0, 0  # steps seen, and the number of the last one, which may become absolute
        self._timed_roots: dict[int, int] = {}  # in this step: up to which step a call represents it
        self._represented: dict[int, int] = {}  # up to which step calls of a root have represented it
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

    def begin_forward(self, module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        """Record the beginning of a sampled call, if it is on a device."""
        if module.depth == 0:
            self._calls.spans.clear()  # spans of calls that an exception ended
            if (device := device_of(module, inputs, kwargs)) is not None:
                self._seen[module.id] = device  # roots are timed as a whole
                self._represented.setdefault(module.id, self._steps)
            return
        if not self._forwards.meet(module.depth) or len(self._pending) >= MOST_PENDING:
            return
        device = device_of(module, inputs, kwargs)
        if device is not None:
            self._seen[module.id] = device
            self._calls.spans.append(self._begin(module, device))

    def end_forward(self, module: Module) -> None:
        """Record the end of a call, if its beginning was recorded."""
        spans = self._calls.spans
        if not any(span.number == module.id for span in spans):
            return  # its beginning was not recorded; spans of enclosing calls stay
        while (span := spans.pop()).number != module.id:
            pass  # the span of a call that an exception ended
        self._end(span, self._of_forward.labels(module.name), self._forwards.weight())

    def begin_root(self, module: Module) -> None:
        """Record the beginning of a root's call, unless a plugin samples the modules in this step."""
        device = self._seen.get(module.id)
        is_watched = self.is_sampled and self._context.interval > 1
        if device is not None and not is_watched and self._context.is_alone and len(self._pending) < MOST_PENDING:
            self._roots[module.id] = self._begin(module, device)

    def end_root(self, module: Module) -> None:
        """Record the end of a root's call, if its beginning was recorded."""
        span = self._roots.pop(module.id, None)
        if span is not None:
            until = self._steps + DIRECTIONS * self._context.interval
            self._end(span, self._of_forward.labels(module.name), max(0, until - self._represented[module.id]))
            self._timed_roots[module.id] = until

    def begin_backward(self, module: Module) -> None:
        """Record the beginning of a backward whose call was on a device, in the stream that the engine has set."""
        if module.id in self._seen and self._backwards.meet(module.depth) and len(self._pending) < MOST_PENDING:
            span = self._begin(module, self._seen[module.id], is_current=True)
            self._open.setdefault(module.id, []).append(span)

    def end_backward(self, module: Module) -> None:
        """Record the end of a backward."""
        spans = self._open.get(module.id)
        if spans:
            self._end(spans.pop(), self._of_backward.labels(module.name), self._backwards.weight())

    def _begin(self, module: Module, device: torch.device, *, is_current: bool = False) -> Span:
        """Record the beginning of a span in the current stream of a device, or of the current device of its type."""
        accelerator = accelerator_of(device.type)
        assert accelerator is not None  # `device_of` returns no other
        stream = accelerator.stream(None if is_current else device)
        start = self._event(stream)
        start.record(stream)
        return Span(module.id, stream, start)

    def _end(self, span: Span, seconds: Any, weight: int) -> None:
        stop = self._event(span.stream)
        stop.record(span.stream)
        self._pending.append((span, stop, seconds, weight))

    def _event(self, stream: Any) -> Any:
        """Return an event of the stream's device."""
        # torch does not record an event on two devices.
        free = self._free[stream.device]
        accelerator = accelerator_of(stream.device.type)
        assert accelerator is not None  # it has the stream
        return free.pop() if free else accelerator.event(is_timed=True)

    def step_done(self) -> None:
        """End a step: read the spans that are over, and decide what to time next."""
        self._read()
        if self._context.step == self._last_step:  # the step of another optimizer
            return
        self._last_step, self._steps = self._context.step, self._steps + 1
        self._open.clear()
        if self._timed_roots:
            # If a model is called several times in a step, each call has represented as many steps.
            for number, until in self._timed_roots.items():
                self._represented[number] = max(self._represented.get(number, 0), until)
            self._timed_roots.clear()
            self.is_root = False
        if self.is_sampled:
            self.is_root = self.is_root or self.is_forward
            self.is_forward = not self.is_forward

    def _read(self) -> None:
        while self._pending and self._pending[0][1].query():
            span, stop, seconds, weight = self._pending.popleft()
            # In milliseconds. Both events are over, so this does not wait.
            seconds.inc(span.start.elapsed_time(stop) * 1e-3 * weight)
            self._free[span.stream.device] += (span.start, stop)


def is_in_use() -> bool:
    """Whether the program has initialized a device."""
    return any(one.is_in_use() for one in accelerators())


def _family(context: Context, direction: str) -> Counter:
    text = f"Time of the device for the module's {direction}, children included, estimated from sampled steps."
    return context.counter(f"{direction}_device_seconds", text, ["module"])


def device_of(module: Module, inputs: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Return the device of a call's first input, else of the module's first parameter; None if it has no events, as the host."""
    tensor = next(iter(tensors((inputs, kwargs))), None)
    if tensor is None:
        own = module.torch()
        tensor = next((parameter for _, parameter in parameters_in(own)), None) if own is not None else None
    device = of_tensor(tensor, "device") if tensor is not None else None
    return device if device is not None and accelerator_of(device.type) is not None else None
