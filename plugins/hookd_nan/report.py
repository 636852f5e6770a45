"""Describe a NaN or an infinity in an incident: the message and the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd import Context
    from hookd_nan.judge import Event

NAMES = {"nan": "NaN", "inf": "Inf"}
DOUBTS = {"inputs", "buffer", "or_in", "parameters", "if_used_in", "elsewhere", "unread"}
"""Details by which an incident is not exact."""


def place(context: Context, event: Event) -> str:
    """Return the place of an event in words."""
    name = event.details.get("parameter", "")
    owned = "buffer" if event.details.get("is_buffer") else "parameter"
    words = {"param": f"{owned} {name}", "grad": f"gradient {name}"}.get(event.where, event.where)
    return f"{context.described(event.module)} {words}".replace("  ", " ").strip()


def describe(context: Context, event: Event, what: str) -> tuple[str, dict[str, object]]:
    """Return the message and the fields of an incident."""
    is_step_absolute = context.is_step_absolute
    is_known = not DOUBTS & event.details.keys() and not isinstance(event.details.get("neginf_in"), list)
    is_exact = is_known and event.is_certain and (event.since == event.step or (is_step_absolute and event.step == 1))
    message = f"{what} {NAMES[event.kind]}: {place(context, event)} at step {event.step}"
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
    return "; ".join([message, *_remarks(context, event)]), {**fields, **event.details}


def _remarks(context: Context, event: Event) -> Iterator[str]:
    """Yield the rest of the message: the reasons for doubt, and what else is bad."""
    details = event.details
    if "if_used_in" in details:
        user = context.described(details["if_used_in"])
        yield f"if {user} uses it without calling its module, which hookd cannot see; otherwise in the output of {user}"
    if "or_in" in details:
        others = ", ".join(map(context.described, details["or_in"]))
        if event.where == "grad":
            yield f"born in its backward, or in that of {others}, or in code between them"
        else:
            yield f"born there, or in {others}, whose outputs are gone, were changed in place, or were not fully checked"
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
        yield f"these could not be read from the device, and may have been bad before: {', '.join(details['unread'])}"
    if "parameters" in details:
        yield (
            "a parameter or buffer inside of it is bad now; it may have been bad before, and used without a call of its module"
        )
    if "gradients" in details:
        yield from _unseen_update(event)
    if "elsewhere" in details:
        yield f"{details['elsewhere']} is bad as well, and may be used there"
    if "buffer" in details:
        yield f"its buffer {details['buffer']} is bad as well, either before the call or because of it"


def _unseen_update(event: Event) -> Iterator[str]:
    """Yield the part of the message about gradients that were not checked."""
    since = event.details.get("since_if_used")
    used = f": if the parameter is used in every step, it went bad in step {since}" if since else ""
    yield f"not all gradients were checked{used}"
    count, last = event.details["bad_parameters"], event.details["last_bad"]
    if count > 1:
        yield f"{count} parameters are bad, the last in the model is {last}"
