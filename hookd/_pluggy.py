"""pluggy, under the one name by which hookd imports it.

In a payload this file is replaced by a private copy of the whole package, so that the target's own pluggy (pytest's,
say, in another version) is neither used nor seen.
"""

from pluggy import HookimplMarker, HookspecMarker, PluginManager, PluginValidationError

__all__ = ["HookimplMarker", "HookspecMarker", "PluginManager", "PluginValidationError"]
