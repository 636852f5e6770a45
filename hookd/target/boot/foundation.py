"""What the agent stands on in torch, each part checked. Runs in the target.

On a torch that hookd was tried on these parts are known to be there. On a newer one the agent starts if all checks hold,
and refuses with the name of the first that does not. `hookd/tool/inject/foundation.py` does the same for the interpreter.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.errors import TargetUnsupported
from hookd.wire.proven import NEWEST_TORCH, minor, version_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_FUNCTION = "nn.Module.__call__"
"""Below torch: what is entered, or replaced."""
_CALLABLE = (
    "nn.Module._call_impl",
    "nn.Module.train",
    "optim.Optimizer.__init__",
    "optim.Optimizer.zero_grad",
    "autograd.backward",
    "Tensor.register_hook",
    "_C._DisableTorchDispatch",
    "_C._current_graph_task_id",
    "_C._get_tracing_state",
    "_C._set_grad_enabled",
)
"""What is replaced or called, whatever it is made of: other tools have wrapped some of it."""


class Check(NamedTuple):
    """One part: its name, whether it is as hookd needs it, and what was seen."""

    name: str
    holds: bool
    found: str


def checks(torch: Any) -> Iterator[Check]:
    """Look at all parts of a torch."""
    yield _checked(_FUNCTION, one := _found(torch, _FUNCTION), holds=isinstance(one, FunctionType))
    for name in _CALLABLE:
        yield _checked(name, one := _found(torch, name), holds=callable(one))


def require(torch: Any) -> None:
    """Refuse a torch that is newer than any that hookd was tried on where a check fails.

    Raises:
        TargetUnsupported: reason "torch-version".
    """
    version = str(getattr(torch, "__version__", ""))
    if minor(version) <= NEWEST_TORCH:
        return
    for check in checks(torch):
        if not check.holds:
            raise TargetUnsupported(
                f"torch {version} is newer than any that hookd was tried on ({version_text(NEWEST_TORCH)}), and one "
                f"check fails there: {check.name}: {check.found}",
                reason="torch-version", hint="A newer hookd may know it.",
            )  # fmt: skip


def _found(torch: Any, name: str) -> Any:
    one = torch
    for part in name.split("."):
        one = vars(one).get(part) if isinstance(one, type) else getattr(one, part, None)
    return one


def _checked(name: str, one: Any, *, holds: bool) -> Check:
    return Check(name, holds, "found" if holds else "there is none" if one is None else f"is a {type(one).__name__}")
