"""hookd: attach to a running PyTorch process, observe it, leave it as it was.

The public API for plugin authors and for code that starts hookd in its own process. Importing it loads neither torch
nor anything of the daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd._pluggy import HookimplMarker
from hookd.api import API_VERSION
from hookd.context import Context
from hookd.errors import HookdError, PluginError, TrainingError
from hookd.events import Call, Module, Returned
from hookd.globs import Globs
from hookd.held import hooks_on
from hookd.inprocess import Observation, observe, read, start, stop
from hookd.metrics import Counter, Gauge, Histogram
from hookd.nested import is_whole, tensors, versions
from hookd.plugin import Plugin
from hookd.summary import Summary
from hookd.version import __version__

if TYPE_CHECKING:
    from typing import Any

hookimpl = HookimplMarker("hookd")


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook `%hookd` and `%%hookd`: IPython calls it at `%load_ext hookd`."""
    from hookd.integrations.jupyter import HookdMagics  # noqa: PLC0415 - IPython is loaded for who asks for it

    shell.register_magics(HookdMagics)


__all__ = [
    "API_VERSION",
    "Call",
    "Context",
    "Counter",
    "Gauge",
    "Globs",
    "Histogram",
    "HookdError",
    "Module",
    "Observation",
    "Plugin",
    "PluginError",
    "Returned",
    "Summary",
    "TrainingError",
    "__version__",
    "hookimpl",
    "hooks_on",
    "is_whole",
    "load_ipython_extension",
    "observe",
    "read",
    "start",
    "stop",
    "tensors",
    "versions",
]
