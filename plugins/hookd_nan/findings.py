"""Make the events, count them, and report the origin."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any

from hookd_nan.judge import Event, Looks
from hookd_nan.scan import is_within

if TYPE_CHECKING:
    from hookd import Context, Module
    from hookd_nan.blame import Blame
    from hookd_nan.report import Reporter
    from hookd_nan.scan import Scan


UNREAD = 64
"""Number of events that could not be judged of which an incident can tell."""


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
        self._context = context
        self._unread: deque[Event] = deque(maxlen=UNREAD)
        self._unread_count = 0

    def succeed(self, predecessor: Findings) -> None:
        """Take over the counts of a predecessor."""
        self._nonfinite.adopt(predecessor._nonfinite)  # noqa: SLF001
        self._unread, self._unread_count = predecessor._unread, predecessor._unread_count  # noqa: SLF001

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
        self._reporter.report(event if event is None else self._with_unread(event))

    def note_unread(self, event: Event) -> None:
        """Record an event that could not be judged, because its values could not be read from their device."""
        self._unread.append(event)
        self._unread_count += 1
        count = self._unread_count
        if not count & (count - 1):  # 1, 2, 4, 8
            last = f"{event.where} of {event.module or 'the training'} at step {event.step}"
            self._context.log(
                f"{count} check{'s' if count > 1 else ''} not judged: values could not be read from the device, so a NaN in them"
                f" is not reported; the last: {last}"
            )

    def _with_unread(self, event: Event) -> Event:
        """Return the event with the earlier ones of its step that could not be judged, and may be the origin."""
        earlier = (one for one in self._unread if one.step == event.step and one.order < event.order)
        places = [f"{one.module} {one.where}".strip() for one in earlier if _may_precede(one, event)]
        if not places:
            return event
        return event.having(unread=list(dict.fromkeys([*places, *event.details.get("unread", ())])))

    def gradients_used(self) -> None:
        """Record that an optimizer has used bad gradients."""
        self._reporter.gradients_used()


def _may_precede(unread: Event, event: Event) -> bool:
    """Whether a value that could not be read may be the origin of one that was found bad after it.

    An output's inputs were good, so only a call in it can be; a bad gradient has a bad one before it, and a bad loss any output.
    """
    if event.where == "output":
        return unread.where == "output" and is_within(unread.module, event.module)
    return unread.where == event.where == "grad" or (unread.where == "output" and event.where == "loss")
