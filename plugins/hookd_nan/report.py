"""What a person is told: one incident for the first NaN or infinity, and one more if its place is known only later.

Runs in the target.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookd

if TYPE_CHECKING:
    from hookd import Context
    from hookd_nan.capture import Capture
    from hookd_nan.judge import Event
    from hookd_nan.policy import Policy
    from hookd_nan.recorder import Recorder

NAMES = {"nan": "NaN", "inf": "Inf"}
FRAMES = 12
_OURS = (f"{Path(hookd.__file__).parent}/", f"{Path(__file__).parent}/", "<hookd")


class Reporter:
    """Tells what was found first, and has every module looked at until its place is known.

    Attributes:
        is_over: the origin is known, or lost: what is bad from now on follows from it.
    """

    def __init__(self, context: Context, recorder: Recorder, policy: Policy, capture: Capture) -> None:
        self._context, self._recorder, self._policy, self._capture = context, recorder, policy, capture
        labels = ["module", "where", "kind"]
        self._origin = context.gauge("origin", "1 for the place where the first NaN or infinity was born.", labels)
        self._first_step = context.gauge("first_step", "Step in which the first NaN or infinity was born.")
        self._hit: Event | None = None  # it is there, but nobody knows in which module it was born
        self._is_spoiled = False  # bad gradients were used since then: parameters are bad now
        self.is_over = False

    def report(self, event: Event | None) -> None:
        """Tell of an origin, the first time; or of the place of one that was told without it."""
        if event is None or self.is_over:
            return
        if self._hit is None:
            message = self._tell(event, "first")
            if event.is_certain:
                self.is_over = True
            else:
                self._hit = event
                self._context.hold(1)
            self._policy.told(message, is_late=event.is_late)
        elif event.is_certain and event.where in ("output", "param", "grad"):
            self._close(self._hit, event)

    def gradients_used(self) -> None:
        """Bad gradients have gone into the parameters."""
        self._is_spoiled = self._hit is not None

    def _close(self, hit: Event, event: Event) -> None:
        """Name the place, unless this is but a consequence."""
        if event.where == "grad" and hit.where != "grad":
            return  # what was bad was there before the backward
        if event.where == "param" and self._is_spoiled:
            self._context.log(f"where the {NAMES[hit.kind]} of step {hit.step} was born cannot be told any more: the"
                              " optimizer has used bad gradients since")  # fmt: skip
        else:
            event.since = min(event.since, hit.since) if event.step - hit.step <= 1 else event.since
            self._origin.remove(hit.module, hit.where, hit.kind)
            self._tell(event, "origin of the", hit)
        self.is_over = True
        self._context.hold(None)

    def _tell(self, event: Event, what: str, hit: Event | None = None) -> str:
        self._origin.labels(event.module, event.where, event.kind).set(1)
        is_absolute, more = self._context.is_step_absolute, {}
        if hit is None:
            self._first_step.set(event.step)
            more = self._recorder.contents(event.at)
        message, fields = describe(event, what, is_step_absolute=is_absolute)
        if not event.is_late:
            fields["python_stack"] = training_stack()
        if hit is not None:
            message += f"; first seen in {place(hit)} at step {hit.step}"
            fields["first_seen"] = {"step": hit.step, "module": hit.module, "where": hit.where}
        if self._capture.is_on:
            more.update(self._capture.take(event, {"message": message, **fields, **more}))
        self._context.incident(event.kind, message, **fields, **more)
        return message


def place(event: Event) -> str:
    """Say where it was, in words."""
    parameter = event.details.get("parameter", "")
    words = {"param": f"parameter {parameter}", "grad": f"gradient {parameter}"}.get(event.where, event.where)
    return f"{event.module} {words}".replace("  ", " ").strip()


def describe(event: Event, what: str = "first", *, is_step_absolute: bool) -> tuple[str, dict[str, Any]]:
    """Say what happened, for a person and for a machine."""
    is_known = not {"inputs", "buffer"} & event.details.keys()
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
    if "or_in" in event.details:
        message += (
            f"; born there, or in {', '.join(event.details['or_in'])}, whose outputs are gone or were changed in place"
        )
    elif not event.is_certain:
        message += "; it need not have been born there"
    if not event.is_certain:
        message += "; every module is looked at from now on"
    if event.details.get("inputs") == "unknown":
        who = "it" if event.is_certain else "the model"
        message += f"; {who} has changed its inputs in place, so they may have been bad before"
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


def training_stack() -> list[str]:
    """Give the Python stack of the training code, the outermost first: `file:line function`, without hookd's frames."""
    frames = ((frame.f_code, line) for frame, line in traceback.walk_stack(None))
    lines = [
        f"{code.co_filename}:{line} {code.co_name}"
        for code, line in frames
        if not code.co_filename.startswith(_OURS) and "/torch/" not in code.co_filename
    ]
    return lines[FRAMES - 1 :: -1] if len(lines) >= FRAMES else lines[::-1]
