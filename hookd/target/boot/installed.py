"""Plugins that are installed in the training's environment.

They are found by their metadata. As with carried plugins, hookd's own loader imports them from source, so that they can be
unloaded with it.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import posix
import stat
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from hookd.errors import PluginError
from hookd.wire.descriptors import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.wire.agent import PluginConfig

GROUP = "hookd.plugins"
_found: tuple[object, list[Any]] = (None, [])


def installed() -> list[PluginConfig]:
    """Return `name`, `entry`, `version` and `origin` of each plugin installed in this environment, without importing any."""
    plugins = {plugin.name: plugin for plugin in reversed(_entries())}
    return [_described(plugins[name]) for name in sorted(plugins)]


def find(name: str) -> tuple[PluginConfig, dict[str, bytes]]:
    """Find a plugin in this environment, with its sources.

    The sources are those of its top-level module.

    Returns:
        The plugin as `installed` describes it plus the `sha256` of its sources, and the sources by path.

    Raises:
        PluginError: reason "no-such-plugin", or the source cannot be read.
    """
    entry = _named(name)
    files = dict(_sources(name, entry.value.partition(":")[0].partition(".")[0]))
    digest = hashlib.sha256(entry.value.encode())
    for path, content in sorted(files.items()):
        digest.update(f"\n{len(path)} {path} {len(content)}\n".encode())
        digest.update(content)
    return {**_described(entry), "sha256": digest.hexdigest()}, files


def entry_point(name: str) -> str:
    """Return `module:Class` of a plugin in this process's environment.

    Raises:
        PluginError: reason "no-such-plugin".
    """
    return str(_named(name).value)


def _named(name: str) -> Any:
    for plugin in _entries():
        if plugin.name == name:
            return plugin
    raise PluginError(f"no plugin {name!r} is installed here", reason="no-such-plugin")


def _entries() -> list[Any]:
    """Return the entry points of the installed plugins, read anew after something was installed or removed.

    Reading them takes 10 ms, because it looks at all distributions in the environment.
    """
    global _found
    state = [(path, _changed_ns(path)) for path in sys.path]
    if state != _found[0]:
        _found = (state, list(entry_points(group=GROUP)))
    return _found[1]


def _changed_ns(path: str) -> int | None:
    try:
        return posix.stat(path or ".").st_mtime_ns
    except OSError:
        return None


def _described(entry: Any) -> PluginConfig:
    version = entry.dist.version if entry.dist is not None else ""
    origin = entry.dist.metadata["Name"] if entry.dist is not None else ""
    return {"name": entry.name, "entry": entry.value, "version": version, "origin": f"{origin} in the target"}


def _sources(plugin: str, module: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of a top-level module's sources, without importing it.

    Raises:
        PluginError: the module cannot be found, or contains files other than Python.
    """
    spec = importlib.machinery.PathFinder.find_spec(module, sys.path)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise PluginError(f"{plugin}: the source of its module {module} cannot be found here")
    if not spec.submodule_search_locations:
        yield spec.origin.rpartition("/")[2], read(spec.origin)
        return
    root = spec.origin.rpartition("/")[0]
    above = root.rpartition("/")[0] + "/"
    for path in _files(root):
        if path.endswith((".so", ".pyd")):
            raise PluginError(
                f"{plugin}: {path} is not Python code, and only Python code can be unloaded without a trace"
            )
        if path.endswith(".py"):
            yield path.removeprefix(above), read(path)


def _files(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder. Links to folders are not followed."""
    for name in sorted(posix.listdir(folder)):
        path = f"{folder}/{name}"
        if stat.S_ISDIR(posix.lstat(path).st_mode):
            yield from _files(path)
        else:
            yield path
