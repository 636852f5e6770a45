"""The values available to the hooks of a module call, in one list with fixed places.

The entry in C makes such a list for each call that it reports (`hookd/native/notify.c`); a dict would take three times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookd.api.events import Module

NAMES = (
    "module",
    "inputs",
    "kwargs",
    "recompute",
    "versions",
    "output",
    "elapsed_ns",
    "self_ns",
    "is_nested",
    "inference",
)
"""Names of the hooks' arguments, by place; `hookd/native/entry.h` has the same order."""
MODULE, INPUTS, KWARGS, RECOMPUTE, VERSIONS, OUTPUT, ELAPSED, SELF, IS_NESTED, INFERENCE = range(len(NAMES))
CALL_HOOKS = ("forward_pre", "forward", "output_summary", "root_forward_pre", "root_forward")
"""The hooks that take their values from such a list; all others have dicts."""


def values_of(
    module: Module,
    inputs: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    output: Any = None,
    *,
    recompute: bool = False,
    inference: bool = False,
) -> list[Any]:
    """Return the values of a call that begins, with placeholders for those known only when it has returned."""
    return [module, inputs, kwargs, recompute, (), output, 0, 0, False, inference]
