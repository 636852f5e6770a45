"""What the two halves of the plugin share: its options and metrics, what it has seen, and how that is put into an event.

Runs in the target.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from hookd import Context, Module, Plugin, PluginError, hookimpl
from hookd_nan.capture import Capture
from hookd_nan.gradients import Gradients
from hookd_nan.implied import Implied
from hookd_nan.judge import Event, Judge, Looks
from hookd_nan.pending import Queue
from hookd_nan.policy import POLICIES, Policy
from hookd_nan.recorder import Recorder
from hookd_nan.report import Reporter
from hookd_nan.scan import Scan, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer


class Looking(Plugin):
    """Has everything that both the forward and the backward half work with."""

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
        self.judge = Judge(patience)
        self.gradients = Gradients(context, self.scan)
        self.queue = Queue(context)
        self.seen = Seen()
        self.implied = Implied(context.per_module())
        self.outputs, self.backwards, self.gates, self.used = Looks(), Looks(), Looks(), Looks()
        self.judged_whole: set[int] = set()  # by module.id: it is known whether all of its output is looked at
        self.unseen: list[str] = []  # the modules of which not all is
        self.is_inside = False  # a root is being called whose modules are looked at
        self.traced: set[int] = set()  # threads in whose outermost call a bad output was traced back
        self.stepping: Optimizer | None = None
        self.scaled = self.was_scaled = (
            False  # the last loss looked like one that a GradScaler scaled; one since the last step
        )
        self.has_closure = False  # an optimizer calls one, which makes gradients and uses them in the same step
        self.masks = not self.scan.neginf
        self.order = 0
        self.reached: dict[int, int] = {}  # by module.id: when in that order a gradient last reached it
        self.is_skipping = False  # the step in progress is one whose gradients were taken away
        self.undecided: list[Event] = []  # bad gradients, not counted until it is known what becomes of them

    @hookimpl
    def succeed(self, predecessor: Looking) -> None:
        """Know all that was known with other options: a second first NaN would be none."""
        self.judge, self.judge.patience = predecessor.judge, self.judge.patience
        for name in ("outputs", "backwards", "gates", "used", "undecided", "reached", "seen", "judged_whole", "unseen"):
            setattr(self, name, getattr(predecessor, name))
        for name in ("order", "scaled", "was_scaled", "has_closure", "stepping", "is_inside", "traced"):
            setattr(self, name, getattr(predecessor, name))
        self.scan.is_strict = predecessor.scan.is_strict
        self.gradients.succeed(predecessor.gradients)
        self.recorder.succeed(predecessor.recorder)
        self.reporter.succeed(predecessor.reporter)
        self.queue.succeed(predecessor.queue)
        self.nonfinite.adopt(predecessor.nonfinite)
        self.policy.acted.adopt(predecessor.policy.acted)

    def _event(
        self, where: str, module: str, looks: Looks | None = None, inside: tuple[Module, ...] | None = None
    ) -> Event:
        """Describe what is seen now; `looks` tells since when it may have been there, None: it was made now."""
        step, stack = self.context.step, tuple(m.name for m in (self.context.stack() if inside is None else inside))
        since = step if looks is None else looks.since(step)
        self.order += 1
        event = Event(where, "", module, step, stack, thread=get_ident(), order=self.order, since=since)
        # What an optimizer makes of a parameter shows in the next step: it may be older by that than what a call makes.
        event.own_since = self.gates.last(step)
        return event

    def _blame_update(self, event: Event | None) -> None:
        """Put a parameter to blame that gradients have made bad that nobody has looked at."""
        if event is not None and self.scan.is_strict and not event.is_late and not self.reporter.is_over:
            self.gradients.blame_update(event, is_seen=self.used.last(event.step) >= event.own_since)

    def _hold_gates(self, *, is_over: bool) -> None:
        """Look at the gradients of every step while anything is suspicious, or somebody needs it; else as the budget allows.

        Args:
            is_over: a step is; that they are needed no more is told only then.
        """
        self.was_scaled = self.was_scaled or self.scaled
        needs = self.was_scaled or self.captures or self.has_closure
        is_wanted = needs or bool(self.undecided) or not self.judge.is_calm
        if is_wanted or is_over:
            self.context.hold(1 if is_wanted else None, *self.sampled_last)
        self.was_scaled = self.was_scaled and not is_over

    def _details(self, candidates: Mapping[Any, Tensor], kind: str) -> dict[str, Any]:
        """Count what is bad in the first tensor that is so in that way."""
        for name, tensor in candidates.items():
            if (self.scan([tensor], masks=True) or self.scan.trained([tensor])) == kind:
                return {**({"parameter": name} if isinstance(name, str) else {}), **self.scan.counts(tensor)}
        return {}

    def _count(self, event: Event) -> None:
        if event.kind:
            self.reporter.noticed(event.step)
            self.nonfinite.labels(event.module, event.where, event.kind).inc()
