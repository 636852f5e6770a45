"""Make the events, count the bad ones, and report the origin: as one incident, or in a second one if it is known later."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from hookd import names_above, training_stack
from hookd_nan.judge import CheckedSteps, Event
from hookd_nan.report import NAMES, describe, place

if TYPE_CHECKING:
    from hookd import Context, Module
    from hookd_nan.blame import Blame
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder
    from hookd_nan.scan import Scan

QUIET = 100
"""Number of steps without a bad value after which the next one is a new case."""
CASES = 8
"""Largest number of cases that are reported: a training that recovers again and again must not flood the user."""
SPREAD_EVERY = 50
"""Steps between two checks once the origin is known: they only show how far bad values have spread."""
SHOWN = 16
"""Largest number of places with a series of `hookd_nan_origin`."""
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
        self.outputs, self.backwards, self.gates, self.used = (
            CheckedSteps(),
            CheckedSteps(),
            CheckedSteps(),
            CheckedSteps(),
        )
        self.order = 0

    def event(
        self,
        where: str,
        module: str,
        checked: CheckedSteps | None = None,
        inside: tuple[Module, ...] | None = None,
        **more: Any,
    ) -> Event:
        """Return a new event of this step, with an empty `kind`.

        Args:
            where: the kind of place.
            module: name of the module.
            checked: earlier checks of this place, for `since`; None: the value was made now.
            inside: the modules being called, the outermost first; None: those of this thread.
            more: other attributes of the event.
        """
        step, stack = self._context.step, tuple(m.name for m in (self._context.stack() if inside is None else inside))
        since = step if checked is None else checked.since(step)
        self.order += 1
        # A parameter that an optimizer made bad is seen in the next step, so it may be a step older than an output.
        own_since = self.gates.last(step)
        return Event(
            where, "", module, step, stack,
            thread=get_ident(), order=self.order, since=since, own_since=own_since, **more,
        )  # fmt: skip


@dataclass
class Case:
    """The present NaN or infinity, and what is known about it.

    Attributes:
        hit: the event that was reported although its origin is unknown; None if there is none.
        is_spoiled: an optimizer has used bad gradients since the hit, so parameters are bad now.
        is_over: the origin is known, or lost: later bad values are consequences.
        shown: the modules with a series of `hookd_nan_origin` for this case.
        number: number of cases reported so far, with this one once it is.
        last_bad: last step in which something bad was seen.
    """

    hit: Event | None = None
    is_spoiled: bool = False
    is_over: bool = False
    shown: list[str] = field(default_factory=list)
    number: int = 0
    last_bad: int = 0


class Findings:
    """Counts bad values, reports the first of a case, and has every module checked until its origin is known.

    Attributes:
        case: the present case.
        unread: the last events that could not be judged.
        unread_count: number of such events.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self, context: Context, scan: Scan, checks: Checks, blame: Blame, recorder: Recorder, policy: Policy
    ) -> None:
        self._context, self._scan, self._checks, self._blame = context, scan, checks, blame
        self._recorder, self._policy = recorder, policy
        labels = ["module", "where", "kind"]
        self._nonfinite = context.counter("nonfinite", "Tensors seen with a NaN or else an infinity.", labels)
        self._origin = context.gauge("origin", "1 for the place where the first NaN or infinity was born.", labels)
        self._first_step = context.gauge("first_step", "Step in which the first NaN or infinity was born.")
        self.case = Case()
        self.unread: deque[Event] = deque(maxlen=UNREAD)
        self.unread_count = 0

    @property
    def is_over(self) -> bool:
        """Whether the origin is known, or lost: later bad values are consequences."""
        return self.case.is_over

    def hold(self) -> None:
        """Check every module in every step while the origin of a reported value is unknown, and seldom once it is known."""
        if self.case.is_over:
            self._context.hold(None if "every" in self._context.options else SPREAD_EVERY)
        elif self.case.hit is not None:
            self._context.hold(1)

    def count(self, event: Event) -> None:
        """Count an event if its value is bad."""
        if event.kind:
            self.count_one(event.module, event.where, event.kind, event.step)

    def count_one(self, module: str, where: str, kind: str, step: int) -> None:
        """Count a bad value."""
        self.case.last_bad = max(self.case.last_bad, step)
        self._nonfinite.labels(module, where, kind).inc()

    def gradients_used(self) -> None:
        """Record that an optimizer has used bad gradients."""
        self.case.is_spoiled = self.case.hit is not None

    def step_done(self) -> None:
        """Begin a new case if nothing bad has been seen for `QUIET` steps."""
        case = self.case
        if (case.is_over or case.hit is not None) and self._context.step - case.last_bad > QUIET:
            if case.number < CASES:
                self.case = Case(number=case.number)
                self._context.hold(None)
            else:
                case.is_over = True
                self.hold()

    # -- values that could not be read

    def note_unread(self, event: Event) -> None:
        """Record an event that could not be judged, because its values could not be read from their device."""
        self.unread.append(event)
        self.unread_count += 1
        count = self.unread_count
        if not count & (count - 1):  # 1, 2, 4, 8
            last = f"{event.where} of {event.module or 'the training'} at step {event.step}"
            self._context.log(
                f"{count} check{'s' if count > 1 else ''} not judged: values could not be read from the device, so a NaN in them"
                f" is not reported; the last: {last}"
            )

    def _with_unread(self, event: Event) -> Event:
        """Return the event with the earlier ones of its step that could not be judged, and may be the origin."""
        earlier = (one for one in self.unread if one.step == event.step and one.order < event.order)
        places = [f"{one.module} {one.where}".strip() for one in earlier if _may_precede(one, event)]
        if not places:
            return event
        return event.having(unread=list(dict.fromkeys([*places, *event.details.get("unread", ())])))

    # -- incidents

    def report(self, origin: Event | None) -> None:
        """Report an origin, or the parameter that unchecked gradients have made bad, if there is one."""
        if origin is not None and self._scan.is_strict and not origin.is_late and not self.is_over:
            is_seen = self._checks.used.last(origin.step) >= origin.own_since
            origin = self._blame.update(origin, is_seen=is_seen)
        self.report_as_found(origin)

    def report_as_found(self, event: Event | None) -> None:
        """Report the first bad value of a case, or the origin of one that was reported without it."""
        case = self.case
        if event is None or case.is_over:
            return
        event = self._with_unread(event)
        if case.hit is None:
            case.is_over, case.hit = event.is_certain, None if event.is_certain else event
            case.number += 1
            if case.number == 1:
                self._first_step.set(event.step)
            fields = self._recorder.contents(event.at)
            message = self._send(case, event, "first" if case.number == 1 else "another", **fields)
            self.hold()
            self._policy.act_on(message, is_late=event.is_late)
        elif event.is_certain and event.where in ("output", "param", "grad"):
            self._close(case, case.hit, event)

    def _close(self, case: Case, hit: Event, event: Event) -> None:
        """Report the origin and close the case, unless the event is only a consequence."""
        if event.where == "grad" and hit.where != "grad":
            return  # the hit was already there before the backward
        if event.where == "param" and case.is_spoiled:
            self._context.log(f"the origin of the {NAMES[hit.kind]} at step {hit.step} cannot be found any more: the"
                              " optimizer has used bad gradients since then")  # fmt: skip
        else:
            if event.step - hit.step <= 1:
                event = replace(event, since=min(event.since, hit.since))
            for module in case.shown:
                self._origin.remove(module, hit.where, hit.kind)
            first_seen = {"step": hit.step, "module": hit.module, "where": hit.where}
            seen = f"; first seen in {place(self._context, hit)} at step {hit.step}"
            self._send(case, event, "origin of the", seen, first_seen=first_seen)
        case.is_over = True
        self.hold()

    def _send(self, case: Case, event: Event, what: str, more: str = "", **fields: Any) -> str:
        """Set the metric, send an incident, and return its message."""
        self._set_origin(case, event)
        message, described = describe(self._context, event, what)
        if not event.is_late:
            described["python_stack"] = training_stack()
        self._context.incident(event.kind, message + more, **described, **fields)
        return message + more

    def _set_origin(self, case: Case, event: Event) -> None:
        """Set the metric: 1 for a certain origin, the share of each of several, 0 where the value was only seen."""
        places = [event.module, *event.details.get("or_in", ())]
        # Even a certain event can have several places, if not all values could be checked.
        share = 1 / len(places) if event.is_certain or len(places) > 1 else 0.0
        share = share / 2 if {"if_used_in", "elsewhere"} & event.details.keys() else share
        case.shown = places[:SHOWN]
        for module in case.shown:
            self._origin.labels(module, event.where, event.kind).set(share)


def _may_precede(unread: Event, event: Event) -> bool:
    """Whether a value that could not be read may be the origin of one that was found bad after it.

    An output's inputs were good, so only a call in it can be; a bad gradient has a bad one before it, and a bad loss any output.
    """
    if event.where == "output":
        return unread.where == "output" and event.module in names_above(unread.module)
    return unread.where == event.where == "grad" or (unread.where == "output" and event.where == "loss")
