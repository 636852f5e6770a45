"""What a person is told: an incident for the first NaN or infinity, and one more if its place is known only later.

Runs in the target.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookd
from hookd_nan.judge import Event

if TYPE_CHECKING:
    from hookd import Context
    from hookd_nan.capture import Capture
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder

NAMES = {"nan": "NaN", "inf": "Inf"}
FRAMES = 12
QUIET = 100
"""After so many steps without a bad value the next one is a case of its own;"""
CASES = 8
"""and so many of these are told of, so that a training that heals itself does not flood a person."""
SHOWN = 16
"""So many places at most get a series."""
_OURS = (f"{Path(hookd.__file__).parent}/", f"{Path(__file__).parent}/", "<hookd")


@dataclass
class Case:
    """What is known of the NaN that is there now.

    Attributes:
        hit: it is there, but nobody knows in which module it was born.
        is_spoiled: bad gradients were used since then: parameters are bad now.
        is_over: the origin is known, or lost: what is bad from now on follows from it.
        shown: the places that the metric names for it.
        number: how many there were, with this one.
        last_bad: the step in which something bad was seen last.
    """

    hit: Event | None = None
    is_spoiled: bool = False
    is_over: bool = False
    shown: list[str] = field(default_factory=list)
    number: int = 0
    last_bad: int = 0


class Reporter:
    """Tells what was found first, and has every module looked at until its place is known."""

    def __init__(self, context: Context, recorder: Recorder, policy: Policy, capture: Capture) -> None:
        self._context, self._recorder, self._policy, self._capture = context, recorder, policy, capture
        labels = ["module", "where", "kind"]
        self._origin = context.gauge("origin", "1 for the place where the first NaN or infinity was born.", labels)
        self._first_step = context.gauge("first_step", "Step in which the first NaN or infinity was born.")
        self._case = Case()

    @property
    def is_over(self) -> bool:
        """Whether the origin is known, or lost: what is bad from now on follows from it."""
        return self._case.is_over

    def succeed(self, predecessor: Reporter) -> None:
        """Go on with the case of another one."""
        self._case = predecessor._case  # noqa: SLF001
        self._origin.adopt(predecessor._origin)  # noqa: SLF001
        self._first_step.adopt(predecessor._first_step)  # noqa: SLF001
        if self._case.hit is not None and not self._case.is_over:
            self._context.hold(1)

    def report(self, event: Event | None) -> None:
        """Tell of an origin, the first time; or of the place of one that was told without it."""
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
        """Bad gradients have gone into the parameters."""
        self._case.is_spoiled = self._case.hit is not None

    def noticed(self, step: int) -> None:
        """Something bad was seen in this step."""
        self._case.last_bad = max(self._case.last_bad, step)

    def step_done(self) -> None:
        """Take the next NaN for a new one, if nothing bad has been seen for a while."""
        case = self._case
        if (case.is_over or case.hit is not None) and self._context.step - case.last_bad > QUIET:
            if case.hit is not None and not case.is_over:
                self._context.hold(None)
            if case.number < CASES:
                self._case = Case(number=case.number)
            else:
                case.is_over = True

    def _close(self, case: Case, hit: Event, event: Event) -> None:
        """Name the place, unless this is but a consequence."""
        if event.where == "grad" and hit.where != "grad":
            return  # what was bad was there before the backward
        if event.where == "param" and case.is_spoiled:
            self._context.log(f"where the {NAMES[hit.kind]} of step {hit.step} was born cannot be told any more: the"
                              " optimizer has used bad gradients since")  # fmt: skip
        else:
            event.since = min(event.since, hit.since) if event.step - hit.step <= 1 else event.since
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

    def _described(self, event: Event, what: str) -> tuple[str, dict[str, Any]]:
        message, fields = describe(event, what, is_step_absolute=self._context.is_step_absolute)
        if not event.is_late:
            fields["python_stack"] = training_stack()
        return message, fields

    def _tell(self, case: Case, event: Event, message: str, fields: dict[str, Any]) -> None:
        self._show(case, event)
        if self._capture.is_on and case.number > 1:
            fields["no_bundle"] = "bundles are made of the first NaN or infinity of a run"
        elif self._capture.is_on:
            fields.update(self._capture.take(event, {"message": message, **fields}))
        self._context.incident(event.kind, message, **fields)

    def _show(self, case: Case, event: Event) -> None:
        """Show the place: 1 where that is certain, its share where it may be others as well, 0 where it was but seen."""
        places = [event.module, *event.details.get("or_in", ())]
        # One that is certain of its place may still have several: where not all can be looked at.
        share = 1 / len(places) if event.is_certain or len(places) > 1 else 0.0
        share = share / 2 if {"if_used_in", "elsewhere"} & event.details.keys() else share
        case.shown = places[:SHOWN]
        for module in case.shown:
            self._origin.labels(module, event.where, event.kind).set(share)


def place(event: Event) -> str:
    """Say where it was, in words."""
    parameter = event.details.get("parameter", "")
    words = {"param": f"parameter {parameter}", "grad": f"gradient {parameter}"}.get(event.where, event.where)
    return f"{event.module} {words}".replace("  ", " ").strip()


def describe(event: Event, what: str = "first", *, is_step_absolute: bool) -> tuple[str, dict[str, Any]]:
    """Say what happened, for a person and for a machine."""
    masked = event.details.get("neginf_in", "")
    is_known = not {
        "inputs",
        "buffer",
        "or_in",
        "parameters",
        "if_used_in",
        "elsewhere",
    } & event.details.keys() and not isinstance(masked, list)
    is_exact = is_known and event.is_certain and (event.since == event.step or (is_step_absolute and event.step == 1))
    message = f"{what} {NAMES[event.kind]}: {place(event)} at step {event.step}"
    if not is_step_absolute:
        message += " (counted from the attach)"
    if is_exact:
        message += ", exact"
    elif event.since == event.step:
        pass
    elif event.since:
        message += f", born since step {event.since}"
    else:
        message += "; it may be older than that"
    if "if_used_in" in event.details:
        user = event.details["if_used_in"]
        message += (
            f"; if {user} uses it without a call of its module, which nobody sees: if not, in the output of {user}"
        )
    if "or_in" in event.details:
        message += f"; born there, or in {', '.join(event.details['or_in'])}, whose outputs are gone, were changed in place, or are not all looked into"
    elif not event.is_certain:
        message += "; it need not have been born there"
    if not event.is_certain:
        message += "; every module is looked at from now on"
    who = "it" if event.is_certain else "the model"
    if event.details.get("inputs") == "unknown":
        message += f"; {who} has changed its inputs in place, so they may have been bad before"
    elif "inputs" in event.details:
        message += f"; {who} was given more than can be looked into, so that may have been bad before"
    if masked:
        where = "its inputs have" if masked == "inputs" else f"the output of {masked[0]} has"
        message += f"; {where} -inf, which is taken for a mask unless neginf=true"
    if "parameters" in event.details:
        message += "; a parameter or buffer inside of it is bad now, and may have been before, used without a call of its module"
    message += _unseen_update(event)
    if "elsewhere" in event.details:
        message += f"; {event.details['elsewhere']} is bad as well, and may be used there"
    if "buffer" in event.details:
        message += f"; its buffer {event.details['buffer']} is bad as well, before the call or by it"
    fields = {
        "step": event.step,
        "since_step": event.since or None,
        "module": event.module,
        "where": event.where,
        "is_exact": is_exact,
        "stack": list(event.stack),
    }
    return message, {**fields, **event.details}


def _unseen_update(event: Event) -> str:
    """Say in what a gradient may have been bad that nobody has looked at; "" where somebody has."""
    if "gradients" not in event.details:
        return ""
    many, last = event.details["bad_parameters"], event.details["last_bad"]
    since = event.details.get("since_if_used")
    said = "; not all gradients were looked at"
    said += f": if it is used in every step, it has gone bad in step {since}" if since else ""
    return f"{said}; {many} parameters are bad, {last} the last in the model" if many > 1 else said


def training_stack() -> list[str]:
    """Give the Python stack of the training code, the outermost first: `file:line function`, without hookd's frames."""
    frames = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
    lines = [
        f"{code.co_filename}:{line} {code.co_name}"
        for code, line in frames
        if not code.co_filename.startswith(_OURS) and "/torch/" not in code.co_filename
    ]
    return lines[FRAMES - 1 :: -1] if len(lines) >= FRAMES else lines[::-1]
