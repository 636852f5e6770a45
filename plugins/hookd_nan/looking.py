"""The common base of the forward and backward hooks: options, metrics, state, and the creation of events."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from hookd import Context, Module, Plugin, PluginError, hookimpl
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
    """Common state of the forward and the backward hooks."""

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
        self.reporter = Reporter(context, self.recorder, self.policy)
        self.skipped = context.counter("amp_skipped_steps", "Optimizer steps skipped for overflowed gradients.")
        self.skipped.inc(0)  # so that the series is there from the start
        self.judge = Judge(patience)
        self.gradients = Gradients(context, self.scan)
        self.queue = Queue(context)
        self.seen = Seen()
        self.implied = Implied(context.per_module())
        self.outputs, self.backwards, self.gates, self.used = Looks(), Looks(), Looks(), Looks()
        self.judged_whole: set[int] = set()  # by module.id: whether all of its output is checked is known
        self.unseen: list[str] = []  # names of modules whose output is not checked as a whole
        self.is_inside = False  # a root is being called, and its modules are checked
        self.traced: set[int] = set()  # threads in whose outermost call a bad output was traced back
        self.stepping: Optimizer | None = None
        self.scaled = self.was_scaled = (
            False  # the last loss looked scaled by a GradScaler; any loss since the last step did
        )
        self.has_closure = False  # an optimizer calls a closure: gradients are made and used in the same step
        self.masks = not self.scan.neginf
        self.order = 0
        self.reached: dict[int, int] = {}  # by module.id: the value of `order` when a gradient last reached it
        self.is_skipping = False  # the gradients of the step in progress were removed
        self.undecided: list[Event] = []  # bad gradients, not counted until their fate is known

    @hookimpl
    def succeed(self, predecessor: Looking) -> None:
        """Take over the state of a predecessor with other options, so that its first NaN is not reported twice."""
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
        """Create an event of this step.

        Args:
            where: the kind of place.
            module: name of the module.
            looks: earlier checks of this place, for `since`; None: the value was made now.
            inside: the modules being called, the outermost first; None: those of this thread.

        Returns:
            The event, with an empty `kind`.
        """
        step, stack = self.context.step, tuple(m.name for m in (self.context.stack() if inside is None else inside))
        since = step if looks is None else looks.since(step)
        self.order += 1
        event = Event(where, "", module, step, stack, thread=get_ident(), order=self.order, since=since)
        # A parameter that an optimizer made bad is seen in the next step, so it may be a step older than an output.
        event.own_since = self.gates.last(step)
        return event

    def _blame_update(self, event: Event | None) -> None:
        """Blame a parameter that unchecked gradients have made bad, if there is one."""
        if event is not None and self.scan.is_strict and not event.is_late and not self.reporter.is_over:
            self.gradients.blame_update(event, is_seen=self.used.last(event.step) >= event.own_since)

    def _hold_gates(self, *, is_over: bool) -> None:
        """Check the gradients in every step while something is suspicious or needs them; else as the budget allows.

        Args:
            is_over: this is the end of a step; only there is checking every step called off.
        """
        self.was_scaled = self.was_scaled or self.scaled
        needs = self.was_scaled or self.has_closure
        is_wanted = needs or bool(self.undecided) or not self.judge.is_calm
        if is_wanted or is_over:
            self.context.hold(1 if is_wanted else None, "step_pre", "closure_done")
        self.was_scaled = self.was_scaled and not is_over

    def _details(self, candidates: Mapping[Any, Tensor], kind: str) -> dict[str, Any]:
        """Return the counts of the first tensor with a bad value of this kind, and its name if it has one."""
        for name, tensor in candidates.items():
            if (self.scan([tensor], masks=True) or self.scan.trained([tensor])) == kind:
                return {**({"parameter": name} if isinstance(name, str) else {}), **self.scan.counts(tensor)}
        return {}

    def _count(self, event: Event) -> None:
        if event.kind:
            self.reporter.noticed(event.step)
            self.nonfinite.labels(event.module, event.where, event.kind).inc()
