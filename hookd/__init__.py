"""hookd: attach to a running PyTorch process, observe it, leave it as it was.

The public API for plugin authors and for code that starts hookd in its own process. Importing it loads neither torch
nor anything of the daemon.
"""

from __future__ import annotations

from hookd._pluggy import HookimplMarker
from hookd.api import API_VERSION
from hookd.context import Context
from hookd.errors import HookdError, PluginError, TrainingError
from hookd.events import Call, Module, Returned
from hookd.globs import Globs
from hookd.held import hooks_on
from hookd.inprocess import Observation, load_ipython_extension, observe, read, start, stop
from hookd.metrics import Counter, Gauge, Histogram
from hookd.nested import is_whole, tensors, versions
from hookd.passive import (
    attributes_of,
    buffers_of,
    children_of,
    groups_of,
    modules_in,
    of_tensor,
    originals_of,
    parameters_in,
    parameters_of,
    peek,
)
from hookd.plugin import Plugin
from hookd.refs import tensor_ref
from hookd.summary import Largest, Summary
from hookd.version import __version__

hookimpl = HookimplMarker("hookd")

__all__ = [
    "API_VERSION",
    "Call",
    "Context",
    "Counter",
    "Gauge",
    "Globs",
    "Histogram",
    "HookdError",
    "Largest",
    "Module",
    "Observation",
    "Plugin",
    "PluginError",
    "Returned",
    "Summary",
    "TrainingError",
    "__version__",
    "attributes_of",
    "buffers_of",
    "children_of",
    "groups_of",
    "hookimpl",
    "hooks_on",
    "is_whole",
    "load_ipython_extension",
    "modules_in",
    "observe",
    "of_tensor",
    "originals_of",
    "parameters_in",
    "parameters_of",
    "peek",
    "read",
    "start",
    "stop",
    "tensor_ref",
    "tensors",
    "versions",
]
