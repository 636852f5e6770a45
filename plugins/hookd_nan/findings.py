"""Make the events, count them, and report the origin."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from hookd_nan.judge import Event, Looks

if TYPE_CHECKING:
    from hookd import Context, Module
    from hookd_nan.blame import Blame
    from hookd_nan.report import Reporter
    from hookd_nan.scan import Scan


class Checks:
    """The last checks of each kind of place, and the events that later ones make.

    Attributes:
        outputs: checks of the modules' outputs.
        backwards: checks of the gradients between modules.
        gates: checks of models' outputs and losses.
        used: checks of the gradients that optimizers are about to use.
        order: number of the last event, or arrival of a gradient at a module.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.outputs, self.backwards, self.gates, self.used = Looks(), Looks(), Looks(), Looks()
        self.order = 0

    def succeed(self, predecessor: Checks) -> None:
        """Take over what a predecessor has checked."""
        self.outputs, self.backwards = predecessor.outputs, predecessor.backwards
        self.gates, self.used = predecessor.gates, predecessor.used
        self.order = predecessor.order

    def event(
        self,
        where: str,
        module: str,
        looks: Looks | None = None,
        inside: tuple[Module, ...] | None = None,
        **more: Any,
    ) -> Event:
        """Return a new event of this step.

        Args:
            where: the kind of place.
            module: name of the module.
            looks: earlier checks of this place, for `since`; None: the value was made now.
            inside: the modules being called, the outermost first; None: those of this thread.
            more: other attributes of the event.

        Returns:
            The event, with an empty `kind`.
        """
        step, stack = self._context.step, tuple(m.name for m in (self._context.stack() if inside is None else inside))
        since = step if looks is None else looks.since(step)
        self.order += 1
        # A parameter that an optimizer made bad is seen in the next step, so it may be a step older than an output.
        own_since = self.gates.last(step)
        return Event(
            where, "", module, step, stack,
            thread=get_ident(), order=self.order, since=since, own_since=own_since, **more,
        )  # fmt: skip


class Findings:
    """Counts bad values, and reports the origin."""

    def __init__(self, context: Context, scan: Scan, checks: Checks, blame: Blame, reporter: Reporter) -> None:
        self._scan, self._checks, self._blame, self._reporter = scan, checks, blame, reporter
        labels = ["module", "where", "kind"]
        self._nonfinite = context.counter("nonfinite", "Tensors seen with a NaN or else an infinity.", labels)

    def succeed(self, predecessor: Findings) -> None:
        """Take over the counts of a predecessor."""
        self._nonfinite.adopt(predecessor._nonfinite)  # noqa: SLF001

    @property
    def is_over(self) -> bool:
        """Whether the origin is known, or lost: later bad values are consequences."""
        return self._reporter.is_over

    def count(self, event: Event) -> None:
        """Count an event if its value is bad."""
        if event.kind:
            self.count_one(event.module, event.where, event.kind, event.step)

    def count_one(self, module: str, where: str, kind: str, step: int) -> None:
        """Count a bad value."""
        self._reporter.noticed(step)
        self._nonfinite.labels(module, where, kind).inc()

    def report(self, origin: Event | None) -> None:
        """Report an origin, or the parameter that unchecked gradients have made bad, if there is one."""
        if origin is not None and self._scan.is_strict and not origin.is_late and not self.is_over:
            is_seen = self._checks.used.last(origin.step) >= origin.own_since
            origin = self._blame.update(origin, is_seen=is_seen)
        self.report_as_found(origin)

    def report_as_found(self, event: Event | None) -> None:
        """Report an event as the origin."""
        self._reporter.report(event)

    def gradients_used(self) -> None:
        """Record that an optimizer has used bad gradients."""
        self._reporter.gradients_used()
