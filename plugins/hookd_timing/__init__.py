"""How long each module takes, forward and backward, and where a step's time goes. Runs in the target.

    hookd_timing_forward_seconds_total{module}     wall time of the module's calls, children included
    hookd_timing_forward_calls_total{module}
    hookd_timing_backward_seconds_total{module}    estimated: one step in `every` is timed, and counted `every` times
    hookd_timing_backward_calls_total{module}      estimated likewise: divide by it for the mean
    hookd_timing_phase_seconds_total{phase}        forward, backward, optimizer, other; together the step's wall time

On a GPU these are the times in which the work is launched, not those in which it runs. A forward that activation
checkpointing runs again belongs to the backward that needs it.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Callable

from hookd import Context, Module, Plugin, hookimpl

if TYPE_CHECKING:
    from hookd import Counter

Inc = Callable[[float], None]
PHASES = ("forward", "backward", "optimizer", "other")
KEPT_SPANS = 1024


class Timing(Plugin):
    """Times modules and the phases of a step.

    Forward calls are all timed: that costs two clock readings, which hookd takes once for all plugins. A backward is
    timed through hooks on the autograd graph, which cost microseconds, so it is sampled.
    """

    name = "timing"
    sampled = ("backward",)
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Declare the metrics; `every` is the one option, and hookd reads that itself."""
        self.context = context
        per_module = ["module"]
        self.forward_seconds = context.counter(
            "forward_seconds", "Wall time of the module's forward calls, children included.", per_module
        )
        self.forward_calls = context.counter("forward_calls", "Forward calls of the module.", per_module)
        self.backward_seconds = context.counter(
            "backward_seconds",
            "Wall time of the module's backward, estimated: sampled steps are counted once for each step they stand for.",
            per_module,
        )
        self.backward_calls = context.counter(
            "backward_calls",
            "Backward calls of the module, estimated likewise: for the mean of backward_seconds.",
            per_module,
        )
        phase: Counter = context.counter("phase_seconds", "Wall time of the training thread by phase.", ["phase"])
        self.phases = {name: phase.labels(name).inc for name in PHASES}
        self.forwards: dict[int, tuple[Any, int, int]] = {}
        self.backwards: dict[int, tuple[Inc, Inc]] = {}
        self.thread: int | None = None  # the one that steps, once that is known
        self.spans: list[tuple[int, int]] = []  # (middle, length) of what ended in this step and lies in no other
        self.busy_ns = 0  # what `phases` were given since `last_ns`
        self.last_ns = 0  # when the last step ended

    @hookimpl
    def forward(self, module: Module, elapsed_ns: int) -> None:
        """Count one call."""
        try:
            cells, seconds, calls = self.forwards[module.id]
        except KeyError:
            first, second = self.forward_seconds.labels(module.name), self.forward_calls.labels(module.name)
            cells, seconds, calls = self.forwards[module.id] = (first.cells, first.at, second.at)
        cells[seconds] += elapsed_ns * 1e-9  # what inc() does, without the calls: this is the hottest line of all
        cells[calls] += 1.0
        if module.depth == 0:
            self._end("forward", elapsed_ns)

    @hookimpl
    def backward(self, module: Module, elapsed_ns: int) -> None:
        """Count one backward of a sampled step for all the steps that it stands for."""
        if module.id not in self.backwards:
            first, second = self.backward_seconds.labels(module.name), self.backward_calls.labels(module.name)
            self.backwards[module.id] = (first.inc, second.inc)
        seconds, calls = self.backwards[module.id]
        seconds(elapsed_ns * 1e-9 * self.context.interval)
        calls(self.context.interval)

    @hookimpl
    def loss_done(self, elapsed_ns: int) -> None:
        """End a phase: a backward is done."""
        self._end("backward", elapsed_ns)

    @hookimpl
    def step_post(self, elapsed_ns: int) -> None:
        """End a phase and, with it, a step; what no phase accounts for is `other` (data, logging, evaluation code)."""
        self.thread = get_ident()
        self._end("optimizer", elapsed_ns)
        now_ns = perf_counter_ns()
        if self.last_ns:
            self.phases["other"](max(0, now_ns - self.last_ns - self.busy_ns) * 1e-9)
        self.last_ns, self.busy_ns = now_ns, 0
        self.spans.clear()

    def _end(self, phase: str, elapsed_ns: int) -> None:
        """Give a phase its time without what other phases had inside it (LBFGS calls the model in its step).

        A span lies inside this one if its middle does: the ends are read a little late, behind other plugins.
        """
        if self.thread is not None and get_ident() != self.thread:
            return  # an evaluation beside the training: its time is not the training thread's
        start_ns = perf_counter_ns() - elapsed_ns
        own_ns = elapsed_ns
        while self.spans and self.spans[-1][0] >= start_ns:
            own_ns -= self.spans.pop()[1]
        self.spans.append((start_ns + elapsed_ns // 2, elapsed_ns))
        del self.spans[:-KEPT_SPANS]
        self.phases[phase](max(0, own_ns) * 1e-9)
        self.busy_ns += max(0, own_ns)
