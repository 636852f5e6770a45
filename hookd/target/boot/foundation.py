"""Checks of the parts of torch that the agent depends on.

An older torch than hookd supports lacks parts that are not checked (nodes of its graph have no sequence number), so that it is
refused. The versions that hookd was tested with are known to have all parts. With a newer version, the agent starts only if all
checks hold; otherwise the refusal names the first that fails. `hookd/tool/inject/foundation.py` does the same for the
interpreter.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.errors import TargetUnsupported
from hookd.wire.tested_versions import NEWEST_TORCH, OLDEST_TORCH, minor, version_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_FUNCTION = "nn.Module.__call__"
"""The function that is entered or replaced, by its name below `torch`."""
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
"""Objects that are replaced or called; they may be of any callable type, because other tools wrap some of them."""


class Check(NamedTuple):
    """The result for one part. It consists of the name, whether the part is as hookd needs it, and what was found."""

    name: str
    holds: bool
    found: str


def checks(torch: Any) -> Iterator[Check]:
    """Check all parts of a torch module, and yield the results."""
    yield _checked(_FUNCTION, value := _found(torch, _FUNCTION), holds=isinstance(value, FunctionType))
    for name in _CALLABLE:
        yield _checked(name, value := _found(torch, name), holds=callable(value))


def require(torch: Any) -> None:
    """Raise if torch is too old, or newer than any that hookd was tested with and a check fails.

    Raises:
        TargetUnsupported: reason "torch-version".
    """
    version = str(getattr(torch, "__version__", ""))
    if (0, 0) < minor(version) < OLDEST_TORCH:
        raise TargetUnsupported(
            f"torch {version} is too old; hookd supports torch {version_text(OLDEST_TORCH)} and newer",
            reason="torch-version", hint="The training needs a newer torch.",
        )  # fmt: skip
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
