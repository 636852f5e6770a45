"""The only module that imports pluggy; hookd imports pluggy from here.

In a payload this file is replaced by a private copy of the whole package, so that the target's own pluggy (that of pytest,
for example, in another version) is neither used nor visible.
"""

from pluggy import HookimplMarker, HookspecMarker, PluginManager, PluginValidationError

__all__ = ["HookimplMarker", "HookspecMarker", "PluginManager", "PluginValidationError"]
