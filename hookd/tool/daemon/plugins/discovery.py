"""Find daemon plugins by their metadata and source, and import them on demand, without torch."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd._pluggy import PluginManager, PluginValidationError
from hookd.api.compatibility import nearest
from hookd.errors import HookdError, PluginError, worded
from hookd.serving import DaemonPlugin, hookspecs
from hookd.tool.attach import sources, trusted
from hookd.wire.plugin_frames import author_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec

    from hookd.tool.daemon.plugins.rows import DaemonPluginRow

    Hooks = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]

GROUP = "hookd.daemon_plugins"
EXTRA = "daemon"
"""The extra of a distribution with the requirements of its daemon plugin alone, which a target never gets."""
_IMPORTING: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
"""Locks by module, held during its import: two daemon plugins in one file must not see it partly initialized."""


@dataclass(frozen=True)
class AvailablePlugin:
    """A daemon plugin that was found, and is not imported yet.

    Attributes:
        source: its source; `source.entry` is `module:Class`.
        path: of its file, if it was found in a plugin directory.
    """

    name: str
    source: sources.Source
    path: Path | None = None

    def has(self, hook: str) -> bool:
        """Whether the source contains the name of a hook."""
        return any(hook.encode() in text for text in self.source.files.values())

    def row(self) -> DaemonPluginRow:
        """Return its row, as of a plugin that no daemon runs."""
        source = self.source
        return {
            "name": self.name, "version": source.version, "sha256": source.sha256, "origin": source.origin,
            "entry": source.entry, "state": None, "error": {},
        }  # fmt: skip

    def load(self) -> tuple[DaemonPlugin, Hooks]:
        """Import the module and create the plugin.

        Returns:
            The plugin, and by hook its method and the names of its arguments.

        Raises:
            PluginError: with the author's line, if there is one.
        """
        module, _, name = self.source.entry.partition(":")
        own = module
        try:
            with without_torch():
                with _IMPORTING[module]:
                    cls = getattr(self._import(module), name)
                own = cls.__module__
                plugin = cls()
        except (Exception, SystemExit) as exc:
            cause = f"{worded(exc)}{author_place(exc, own)}{self._missing(exc)}"
            raise PluginError(f"{self.name}: cannot be imported: {cause}") from exc
        if not isinstance(plugin, DaemonPlugin) or plugin.name != self.name:
            raise PluginError(f"{self.source.entry} is not a hookd.serving.DaemonPlugin with the name {self.name!r}")
        return plugin, hooks(plugin)

    def _missing(self, error: BaseException) -> str:
        """Return a hint to install the plugin's extra, if a module was not found and the distribution has the extra."""
        if not isinstance(error, ModuleNotFoundError):
            return ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            extras = importlib.metadata.metadata(self.source.origin).get_all("Provides-Extra") or ()
            if EXTRA in extras:
                return f"; install the daemon plugin's requirements with: pip install '{self.source.origin}[{EXTRA}]'"
        return ""

    def _import(self, module: str) -> Any:
        if self.path is None:
            return importlib.import_module(module)
        known = sys.modules.get(module)
        if known is not None and self._is_mine(getattr(known, "__file__", None)):
            return known
        installed = importlib.util.find_spec(module) if known is None else None
        if known is not None or (installed is not None and not self._is_mine(installed.origin)):
            raise ImportError(f"there is a module {module!r} already: give {self.path} another name")
        folder = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(module, self.path, submodule_search_locations=folder)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]
            raise
        return loaded

    def _is_mine(self, file: str | None) -> bool:
        """Whether a module's file is this plugin's, as it is if its directory is on sys.path."""
        with contextlib.suppress(OSError):
            return self.path is not None and file is not None and self.path.samefile(file)
        return False


def find(plugin_dirs: Sequence[Path], allows: Callable[[str], bool]) -> tuple[list[AvailablePlugin], list[PluginError]]:
    """Find all allowed daemon plugins, in the given directories, then among the installed ones.

    Of several with one name, the first one is used.

    Returns:
        The plugins, and the errors of invalid ones, such as a file that is not valid Python.
    """
    plugins: dict[str, AvailablePlugin] = {}
    problems: list[PluginError] = []
    for plugin in (*_in_directories(plugin_dirs), *_installed()):
        if isinstance(plugin, PluginError):
            problems.append(plugin)
        elif allows(plugin.name):
            plugins.setdefault(plugin.name, plugin)
    return [plugins[name] for name in sorted(plugins)], problems


def _in_directories(plugin_dirs: Sequence[Path]) -> Iterator[AvailablePlugin | PluginError]:
    ours = trusted.Trust(frozenset({0, os.geteuid()}))  # the plugin runs as our user, whatever the targets' users are
    for directory in plugin_dirs:
        try:
            for source in sources.in_directory(directory, ours, "DaemonPlugin"):
                if isinstance(source, PluginError):
                    yield source
                else:
                    yield _with_caches(AvailablePlugin(source.name, source, Path(source.origin)), ours)
        except PluginError as error:
            yield error


def _with_caches(plugin: AvailablePlugin, ours: trusted.Trust) -> AvailablePlugin | PluginError:
    """Check the `__pycache__` directories as well, because Python runs their code instead of the source."""
    assert plugin.path is not None
    root, name = plugin.path.parent, "__pycache__"
    try:
        for cache in root.rglob(name) if plugin.path.name == "__init__.py" else [root / name]:
            if cache.is_dir():
                ours.directory(cache)
    except PluginError as error:
        return error
    return plugin


def _installed() -> Iterator[AvailablePlugin | PluginError]:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            yield AvailablePlugin(entry.name, sources.installed_source(entry))
        except HookdError as error:
            yield PluginError(f"{entry.name}: {error.message}")


def hooks(plugin: DaemonPlugin) -> Hooks:
    """Return the hooks that a plugin implements: by hook, the method and the names of its arguments.

    Raises:
        PluginError: the name is invalid, or a hook, with the author's line.
    """
    if not plugin.name.isidentifier() or not plugin.name.islower():
        raise PluginError(
            f"{type(plugin).__name__}: {plugin.name!r} cannot be a plugin's name: a lower-case word is needed"
        )
    for attribute in dir(type(plugin)):
        function = getattr(type(plugin), attribute, None)
        if hasattr(function, "hookd_impl"):
            raise _wrong(plugin, function, f"{attribute} is marked for the target: import hookimpl from hookd.serving")
        if hasattr(function, "hookd_daemon_impl") and attribute not in hookspecs.HOOKS:
            raise _wrong(plugin, function, f"there is no hook {attribute!r}; {nearest(attribute, hookspecs.HOOKS)}")
    manager = PluginManager("hookd_daemon")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=plugin.name)
    except PluginValidationError as exc:
        raise PluginError(f"{plugin.name}: {exc}") from exc
    implemented: Hooks = {}
    for hook in hookspecs.HOOKS:
        for impl in getattr(manager.hook, hook).get_hookimpls():
            if impl.kwargnames or impl.wrapper or impl.hookwrapper:
                raise _wrong(plugin, impl.function, f"{hook} must not have defaults, or be a wrapper")
            implemented[hook] = (impl.function, tuple(impl.argnames))
    return implemented


def _wrong(plugin: DaemonPlugin, function: Any, text: str) -> PluginError:
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return PluginError(f"{plugin.name}: {text}{where}")


class _NoTorch(importlib.abc.MetaPathFinder):
    """Refuses to import torch, because the daemon must stay small and start quickly.

    `sys.meta_path` is replaced and not modified: another thread that iterates over it would skip a finder.
    """

    def __init__(self) -> None:
        self._entered = 0
        self._lock = threading.Lock()
        self._before: list[Any] = []

    def enter(self) -> None:
        with self._lock:
            self._entered += 1
            if self not in sys.meta_path:
                self._before = sys.meta_path
                sys.meta_path = [self, *self._before]

    def leave(self) -> None:
        """Restore `sys.meta_path` at the last call, and keep the changes that others have made to it."""
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                others = [finder for finder in sys.meta_path if finder is not self]
                sys.meta_path = self._before if others == self._before else others
                self._before = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name.partition(".")[0] == "torch":
            raise ImportError(
                "the daemon never imports torch: move the plugin for targets to its own module", name=name
            )
        return None


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Refuse imports of torch in this context, which any number of threads may enter."""
    _NO_TORCH.enter()
    try:
        yield
    finally:
        _NO_TORCH.leave()


_NO_TORCH = _NoTorch()
