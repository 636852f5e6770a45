"""Report the first NaN or infinity as an incident, and its origin as a second one if that is only known later."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hookd import training_stack
from hookd_nan.judge import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd import Context
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder

NAMES = {"nan": "NaN", "inf": "Inf"}
QUIET = 100
"""Number of steps without a bad value after which the next one is a new case."""
CASES = 8
"""Largest number of cases that are reported: a training that recovers again and again must not flood the user."""
SHOWN = 16
"""Largest number of places with a series of `hookd_nan_origin`."""
DOUBTS = {"inputs", "buffer", "or_in", "parameters", "if_used_in", "elsewhere", "unread"}
"""Details by which an incident is not exact."""
SENTENCES = {
    "if_used_in": "if {0} uses it without a call of its module, which hookd cannot see; otherwise in the output of {0}",
    "or_in": "born there, or in {}, whose outputs are gone, were changed in place, or were not fully checked",
    "parameters": "a parameter or buffer inside of it is bad now; it may have been bad before, and used without a call"
    " of its module",
    "elsewhere": "{} is bad as well, and may be used there",
    "unread": "these could not be read from the device, and may have been bad before: {}",
    "buffer": "its buffer {} is bad as well, either before the call or because of it",
}
"""What the message says about a detail."""


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


class Reporter:
    """Reports the first bad value, and has every module checked until its origin is known."""

    def __init__(self, context: Context, recorder: Recorder, policy: Policy) -> None:
        self._context, self._recorder, self._policy = context, recorder, policy
        labels = ["module", "where", "kind"]
        self._origin = context.gauge("origin", "1 for the place where the first NaN or infinity was born.", labels)
        self._first_step = context.gauge("first_step", "Step in which the first NaN or infinity was born.")
        self._case = Case()

    @property
    def is_over(self) -> bool:
        """Whether the origin is known, or lost: later bad values are consequences."""
        return self._case.is_over

    def succeed(self, predecessor: Reporter) -> None:
        """Take over the case of another reporter."""
        self._case = predecessor._case  # noqa: SLF001
        self._origin.adopt(predecessor._origin)  # noqa: SLF001
        self._first_step.adopt(predecessor._first_step)  # noqa: SLF001
        if self._case.hit is not None and not self._case.is_over:
            self._context.hold(1)

    def report(self, event: Event | None) -> None:
        """Report the first bad value of a case, or the origin of one that was reported without it."""
        case = self._case
        if event is None or case.is_over:
            return
        if case.hit is None:
            message = self._first(case, event)
            if event.is_certain:
                case.is_over = True
            else:
                case.hit = event
                self._context.hold(1)
            self._policy.told(message, is_late=event.is_late)
        elif event.is_certain and event.where in ("output", "param", "grad"):
            self._close(case, case.hit, event)

    def gradients_used(self) -> None:
        """Record that an optimizer has used bad gradients."""
        self._case.is_spoiled = self._case.hit is not None

    def noticed(self, step: int) -> None:
        """Record that something bad was seen in this step."""
        self._case.last_bad = max(self._case.last_bad, step)

    def step_done(self) -> None:
        """Begin a new case if nothing bad has been seen for `QUIET` steps."""
        case = self._case
        if (case.is_over or case.hit is not None) and self._context.step - case.last_bad > QUIET:
            if case.hit is not None and not case.is_over:
                self._context.hold(None)
            if case.number < CASES:
                self._case = Case(number=case.number)
            else:
                case.is_over = True

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
            message, fields = self._described(event, "origin of the")
            message += f"; first seen in {place(hit)} at step {hit.step}"
            fields["first_seen"] = {"step": hit.step, "module": hit.module, "where": hit.where}
            self._tell(case, event, message, fields)
        case.is_over = True
        self._context.hold(None)

    def _first(self, case: Case, event: Event) -> str:
        case.number += 1
        if case.number == 1:
            self._first_step.set(event.step)
        message, fields = self._described(event, "first" if case.number == 1 else "another")
        self._tell(case, event, message, {**fields, **self._recorder.contents(event.at)})
        return message

    def _described(self, event: Event, what: str) -> tuple[str, dict[str, object]]:
        message, fields = describe(event, what, is_step_absolute=self._context.is_step_absolute)
        if not event.is_late:
            fields["python_stack"] = training_stack()
        return message, fields

    def _tell(self, case: Case, event: Event, message: str, fields: dict[str, object]) -> None:
        self._show(case, event)
        self._context.incident(event.kind, message, **fields)

    def _show(self, case: Case, event: Event) -> None:
        """Set the metric: 1 for a certain origin, the share of each of several, 0 where the value was only seen."""
        places = [event.module, *event.details.get("or_in", ())]
        # Even a certain event can have several places, if not all values could be checked.
        share = 1 / len(places) if event.is_certain or len(places) > 1 else 0.0
        share = share / 2 if {"if_used_in", "elsewhere"} & event.details.keys() else share
        case.shown = places[:SHOWN]
        for module in case.shown:
            self._origin.labels(module, event.where, event.kind).set(share)


def place(event: Event) -> str:
    """Return the place of an event in words."""
    name = event.details.get("parameter", "")
    owned = "buffer" if event.details.get("is_buffer") else "parameter"
    words = {"param": f"{owned} {name}", "grad": f"gradient {name}"}.get(event.where, event.where)
    return f"{event.module} {words}".replace("  ", " ").strip()


def describe(event: Event, what: str = "first", *, is_step_absolute: bool) -> tuple[str, dict[str, object]]:
    """Return the message and the fields of an incident."""
    is_known = not DOUBTS & event.details.keys() and not isinstance(event.details.get("neginf_in"), list)
    is_exact = is_known and event.is_certain and (event.since == event.step or (is_step_absolute and event.step == 1))
    message = f"{what} {NAMES[event.kind]}: {place(event)} at step {event.step}"
    if not is_step_absolute:
        message += " (counted from the attach)"
    if is_exact:
        message += ", exact"
    elif event.since != event.step:
        message += f", born since step {event.since}" if event.since else "; it may be older than that"
    fields = {
        "step": event.step,
        "since_step": event.since or None,
        "module": event.module,
        "where": event.where,
        "is_exact": is_exact,
        "stack": list(event.stack),
    }
    return "; ".join([message, *_remarks(event)]), {**fields, **event.details}


def _remarks(event: Event) -> Iterator[str]:
    """Yield the rest of the message: the reasons for doubt, and what else is bad."""
    details = event.details
    if "if_used_in" in details:
        yield SENTENCES["if_used_in"].format(details["if_used_in"])
    if "or_in" in details:
        yield SENTENCES["or_in"].format(", ".join(details["or_in"]))
    elif not event.is_certain:
        yield "it may have originated elsewhere"
    if not event.is_certain:
        yield "every module is checked from now on"
    subject = "it" if event.is_certain else "the model"
    if details.get("inputs") == "unknown":
        yield f"{subject} has changed its inputs in place, so they may have been bad before"
    elif "inputs" in details:
        yield f"{subject} was given more than can be checked, and the rest may have been bad before"
    if details.get("neginf_in"):
        masked = details["neginf_in"]
        where = "its inputs have" if masked == "inputs" else f"the output of {masked[0]} has"
        yield f"{where} -inf, which is taken for a mask unless neginf=true"
    if "unread" in details:
        yield SENTENCES["unread"].format(", ".join(details["unread"]))
    if "parameters" in details:
        yield SENTENCES["parameters"]
    if "gradients" in details:
        yield from _unseen_update(event)
    for name in ("elsewhere", "buffer"):
        if name in details:
            yield SENTENCES[name].format(details[name])


def _unseen_update(event: Event) -> Iterator[str]:
    """Yield the part of the message about gradients that were not checked."""
    since = event.details.get("since_if_used")
    used = f": if the parameter is used in every step, it went bad in step {since}" if since else ""
    yield f"not all gradients were checked{used}"
    count, last = event.details["bad_parameters"], event.details["last_bad"]
    if count > 1:
        yield f"{count} parameters are bad, the last in the model is {last}"
