"""Back from a bad output of a model to the call in it that made it, in a step in which none was looked at.

Outputs are remembered weakly, so some are gone; then it says in which modules it may have been born. Runs in the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from hookd import Module, Returned
    from hookd_nan.judge import Event
    from hookd_nan.scan import Scan


def back(event: Event, calls: Iterable[Returned], scan: Scan, *, unknown: str) -> None:
    """Put the first call into an event whose output is bad, as far as outputs are still there, unchanged.

    Args:
        event: of the model's output; stays that, if no call in it has a bad one: then the model's own code made it.
        calls: in the order of returning.
        scan: says what is bad.
        unknown: why the model's input may have been bad; a good output in it says that it was not.
    """
    gone: list[str] = []
    for at, returned in enumerate(calls):
        tensor = returned.tensor()
        found = scan([tensor], masks=True) if tensor is not None else ""
        if returned.was_finite:
            gone.clear()
            unknown = ""
        elif tensor is None or not isinstance(found, str):  # of a device nobody knows it yet
            gone.append(returned.module.name)
        elif found:
            event.at = at
            gone += _blame(event, returned, tensor, scan)
            break
        else:
            gone.clear()  # a NaN before it would most likely be in it
            unknown = ""
    event.is_certain = not gone and not unknown
    event.since = event.step
    if gone:
        event.details["or_in"] = list(dict.fromkeys(gone))
    if unknown:
        event.details["inputs"] = unknown


def _blame(event: Event, returned: Returned, tensor: Tensor, scan: Scan) -> list[str]:
    """Put a call, or the code that called it with a bad input, into an event; say in what else it may have been."""
    inputs = [ref() for ref in returned.inputs]
    module, parent, more = returned.module, returned.module.parent, []
    bad = [x for x in inputs if x is not None and x is not tensor and scan([x], masks=True)]
    if bad and parent is not None:
        module, tensor = parent, bad[0]
    elif parent is not None and (not inputs or None in inputs):
        more = [parent.name]
    event.module, event.stack = module.name, path(module)
    event.kind, event.details = str(scan([tensor], masks=True)), scan.counts(tensor)
    return more


def path(module: Module) -> tuple[str, ...]:
    """Give the names of a module and of those that it is in, the outermost first."""
    return (*path(module.parent), module.name) if module.parent is not None else (module.name,)
