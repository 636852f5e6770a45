"""hookd: attach to a running PyTorch process, observe it, leave it as it was.

The public API for plugin authors and for code that starts hookd in its own process. Importing it loads neither torch
nor anything of the daemon.
"""

from __future__ import annotations

from hookd._pluggy import HookimplMarker
from hookd.api.accelerator import Accelerator, accelerator_of, accelerators, may_have_devices
from hookd.api.alarms import Alarm, RecentRate
from hookd.api.compatibility import API_VERSION
from hookd.api.context import Context
from hookd.api.digest import Digest, Extent
from hookd.api.events import Call, Module, Returned
from hookd.api.globs import Globs
from hookd.api.inprocess import Observation, load_ipython_extension, observe, read, start, stop
from hookd.api.metrics import Counter, Gauge, Histogram
from hookd.api.module_hooks import hooks_on
from hookd.api.nested import is_whole, tensors, versions
from hookd.api.passive import (
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
from hookd.api.plugin import Plugin
from hookd.api.rates import Rate
from hookd.api.refs import tensor_ref
from hookd.api.stack import training_stack
from hookd.api.summary import Largest, Summary
from hookd.errors import HookdError, PluginError, TrainingError
from hookd.version import __version__
from hookd.wire.module_names import name_within, names_above, owner_of

hookimpl = HookimplMarker("hookd")

__all__ = [
    "API_VERSION",
    "Accelerator",
    "Alarm",
    "Call",
    "Context",
    "Counter",
    "Digest",
    "Extent",
    "Gauge",
    "Globs",
    "Histogram",
    "HookdError",
    "Largest",
    "Module",
    "Observation",
    "Plugin",
    "PluginError",
    "Rate",
    "RecentRate",
    "Returned",
    "Summary",
    "TrainingError",
    "__version__",
    "accelerator_of",
    "accelerators",
    "attributes_of",
    "buffers_of",
    "children_of",
    "groups_of",
    "hookimpl",
    "hooks_on",
    "is_whole",
    "load_ipython_extension",
    "may_have_devices",
    "modules_in",
    "name_within",
    "names_above",
    "observe",
    "of_tensor",
    "originals_of",
    "owner_of",
    "parameters_in",
    "parameters_of",
    "peek",
    "read",
    "start",
    "stop",
    "tensor_ref",
    "tensors",
    "training_stack",
    "versions",
]
