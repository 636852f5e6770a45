"""Trace a bad output of a model back to the call that made it, in a step in which no module was checked.

hookd keeps only weak references to outputs, so some are gone; `or_in` then lists the modules that may be the origin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from hookd import Module, Returned
    from hookd_nan.judge import Event
    from hookd_nan.scan import Scan


def traced(event: Event, calls: Iterable[Returned], scan: Scan, *, unknown: str) -> Event:
    """Return the event with the first call with a bad output, as far as outputs still exist, unchanged.

    Args:
        event: the model's output. If no call in the model has a bad output, the event stays that: the model's own code
            made the bad value.
        calls: the calls in the model, in the order in which they returned.
        scan: the check for bad values.
        unknown: why the model's input may have been bad; a good output of a call shows that it was not.
    """
    gone: list[str] = []
    for at, returned in enumerate(calls):
        tensor = returned.tensor()
        found = scan([tensor], masks=True) if tensor is not None else ""
        if returned.was_finite:
            gone.clear()
            unknown = ""
        elif tensor is None or not isinstance(found, str):  # on a device: not known yet
            gone.append(returned.module.name)
        elif found:
            event, more = _blamed(replace(event, at=at), returned, tensor, scan)
            gone += more
            break
        else:
            gone.clear()  # an earlier NaN would most likely have reached this output
            unknown = ""
    event = replace(event, is_certain=not gone and not unknown, since=event.step)
    if gone:
        event = event.having(or_in=list(dict.fromkeys(gone)))
    return event.having(inputs=unknown) if unknown else event


def _blamed(event: Event, returned: Returned, tensor: Tensor, scan: Scan) -> tuple[Event, list[str]]:
    """Return the event with a call, or its caller if an input is bad; and other modules that may be the origin."""
    inputs = [ref() for ref in returned.inputs]
    module, parent, more = returned.module, returned.module.parent, []
    bad = [x for x in inputs if x is not None and x is not tensor and scan([x], masks=True)]
    if bad and parent is not None:
        module, tensor = parent, bad[0]
    elif parent is not None and (not inputs or None in inputs):
        more = [parent.name]
    kind, details = str(scan([tensor], masks=True)), scan.counts(tensor)
    return replace(event, module=module.name, stack=path(module), kind=kind, details=details), more


def path(module: Module) -> tuple[str, ...]:
    """Return the names of a module and of the modules that contain it, the outermost first."""
    return (*path(module.parent), module.name) if module.parent is not None else (module.name,)
