"""Import of the agent from memory, and its start.

`stub.py` executes this file before any other code of hookd is loaded. So it uses only the standard library, and its top level
imports only modules that every interpreter has loaded. The agent keeps the `Loader`, imports plugins through it, and purges it
at detach.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.machinery
import importlib.util
import sys
import time
from importlib import _bootstrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import CodeType, ModuleType

    from hookd.wire.agent import AgentConfig

    Codes = Callable[[Mapping[str, bytes], str], Iterable[CodeType]]

AGENT_LOCK = "_hookd_claim"
"""Attribute of `sys` that marks the process as having an agent, from before its first import until it has left."""
_SOURCE_ROOT = "/hookd-payload/"
_PIECE = b"\n\f\f\f"
"""The separator of pieces, set by `hookd/tool/attach/payload.py`; the same as in `stub.py`."""
_REST = 3.0
"""Length of a rest, as a multiple of the time for which hookd has just had the GIL."""
_PRIVATE = "_hookd"
TAG_SEPARATOR = "@"
"""Separates the name of a module from a directory from the directory's tag."""


class Loader:
    """Imports modules from sources in memory, and can remove all of them.

    All code of a process shares the names in `sys.modules`, and `hookd`, `hookd_nan` or `widths` may also be installed in the
    training's environment. So each module has a private name there: `hookd.wire.page` is `_hookd.wire.page`, `widths` is
    `_hookd_widths`. The carried code does not notice: its modules have their own builtins, whose `__import__` finds carried
    modules by their public names. Imports of the training are not affected.

    The name of a module from a directory ends with that directory's tag, `widths@1f2e3d`; the module imports itself without it.

    Args:
        files: sources by path, such as `hookd/__init__.py`.
        codes: yields the code of one file, piece by piece (`codes` in `stub.py`).
        gentle: whether the training runs meanwhile, so that hookd must not hold the GIL for long.
    """

    def __init__(self, files: Mapping[str, bytes], codes: Codes, *, gentle: bool = False) -> None:
        self._files: dict[str, bytes] = {}
        self._codes = codes
        self._tops: frozenset[str] = frozenset()
        self.add(files)
        self._gentle = gentle
        self._rested_at = time.thread_time()
        self._loaded: dict[str, ModuleType] = {}
        self._loading: dict[str, ModuleType] = {}
        # CPython 3.15 calls the second one if a program makes all imports lazy; imports of carried code are never lazy.
        self._builtins = {**vars(builtins), "__import__": self._import, "__lazy_import__": self._import}

    def module(self, name: str) -> ModuleType:
        """Import a carried module by its public name.

        Raises:
            ModuleNotFoundError: it is not carried.
        """
        return self._module(_private(name))

    def _import(
        self,
        name: str,
        globals: Any = None,  # noqa: A002
        locals: Any = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import for carried code, as `__import__` does."""
        own = public(globals["__name__"]).partition(".")[0] if globals else ""
        if level:
            full = importlib.util.resolve_name("." * level + name, globals["__package__"])
        elif TAG_SEPARATOR in own and own.startswith(name.partition(".")[0] + TAG_SEPARATOR):
            full = _private(own + name[own.index(TAG_SEPARATOR) :])
        elif name.partition(".")[0] in self._tops:
            full = _private(name)
        else:
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = self._module(full)
        if not fromlist:
            return self._module(full.partition(".")[0])
        for attribute in getattr(module, "__all__", ()) if "*" in fromlist else fromlist:
            if not hasattr(module, attribute) and self._find(f"{full}.{attribute}"):
                self._module(f"{full}.{attribute}")
        return module

    def _module(self, name: str) -> ModuleType:
        """Return a module by its private name; import it if necessary. Its parent packages are imported as well."""
        module = self._loaded.get(name)
        if module is not None:
            return module
        above, _, child = name.rpartition(".")
        package = self._module(above) if above else None
        # The import system's own lock detects a deadlock of two threads, one of which waits for a module of the program.
        with _bootstrap._ModuleLockManager(name):  # type: ignore[attr-defined]  # noqa: SLF001
            if name in self._loading:  # a circular import
                return self._loading[name]
            if name not in self._loaded:  # by another thread meanwhile
                module = self._load(name)
                if package is not None:
                    setattr(package, child, module)
            return self._loaded[name]

    def _load(self, name: str) -> ModuleType:
        spec = self.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {public(name)!r} in hookd's payload", name=public(name))
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            self.exec_module(module)
        except BaseException:
            _withdraw({name: module})
            raise
        return self._loaded[name]

    def add(self, files: Mapping[str, str | bytes]) -> None:
        """Add or replace sources; modules that are already imported do not change."""
        for path, source in files.items():
            self._files[path] = source.encode() if isinstance(source, str) else bytes(source)
            if path.endswith(".py") and path + "c" not in files:
                self._files.pop(path + "c", None)  # of the old source
        self._tops = frozenset(map(_top, self._files))

    @contextlib.contextmanager
    def renewing(self, files: Mapping[str, str | bytes]) -> Iterator[None]:
        """Add sources inside a context, and import changed modules again there.

        A top-level module is imported again if its source has changed. Objects of the old source continue to use it. If an
        exception leaves the context, everything is restored.
        """
        before, tops = dict(self._files), self._renewed(files)
        new = set(map(_top, files)) - self._tops
        old = self._taken_out(tops)
        for path in [path for path in before if _top(path) in tops]:
            del self._files[path]
        self.add(files)
        try:
            yield
        except BaseException:
            old, back = self._taken_out(tops | new), old
            self._files, self._tops = before, frozenset(map(_top, before))
            self._loaded.update(back)
            sys.modules.update(back)
            raise
        finally:
            for name, module in old.items():
                self._let_go(name, module)

    def _renewed(self, files: Mapping[str, str | bytes]) -> set[str]:
        """Return the carried top-level modules whose sources, or set of files, differ from `files`."""
        new: dict[str, dict[str, bytes]] = {}
        carried: dict[str, dict[str, bytes]] = {}
        for sources, by_top in ((files, new), (self._files, carried)):
            for path, source in sources.items():
                if path.endswith(".py"):  # the separators of pieces are not a difference
                    text = source.encode() if isinstance(source, str) else bytes(source)
                    by_top.setdefault(_top(path), {})[path] = text.replace(b"\f", b"")
        return {top for top in new if top in carried and carried[top] != new[top]} - {"hookd"}

    def _taken_out(self, tops: set[str]) -> dict[str, ModuleType]:
        """Remove and return the modules below some top-level modules. The result has their private names."""
        names = [name for name in self._loaded if public(name).partition(".")[0] in tops]
        out = {name: self._loaded.pop(name) for name in names}
        _withdraw(out)
        _forget_lines(tops)
        return out

    def again(self, config: AgentConfig) -> None:
        """Start another agent in a forked child.

        The same sources are imported again.

        Raises:
            HookdError: the new agent refuses to start.
        """
        # The new agent uses the same private names; the code that is running in this fork does not need them.
        _withdraw(self._loaded)
        start(config, self._files, self._codes)

    def purge(self) -> None:
        """Remove exactly the loaded modules, and all references from them to the loader."""
        _withdraw(self._loaded)
        for name, module in self._loaded.items():
            self._let_go(name, module)
        if getattr(globals().get("__spec__"), "loader", None) is self:
            del globals()["__spec__"]
        # As CPython's own leak tests do (Lib/test/libregrtest/utils.py `clear_caches`): these caches keep generic classes.
        for clear in getattr(sys.modules.get("typing"), "_cleanups", ()):
            clear()
        for location in [path for path, finder in list(sys.path_importer_cache.items()) if finder is self]:
            del sys.path_importer_cache[location]
        for name in ("__import__", "__lazy_import__"):
            self._builtins[name] = importlib.__import__  # a function that is still referred to keeps these builtins
        self._loaded.clear()
        self._files.clear()
        _forget_lines()

    @staticmethod
    def _let_go(name: str, module: ModuleType) -> None:
        """Remove a module's references to the loader: typing's caches keep some functions, which must not reach the payload."""
        getattr(sys.modules.get("typing"), "_overload_registry", {}).pop(name, None)
        for attribute in ("__loader__", "__spec__"):
            getattr(module, "__dict__", {}).pop(attribute, None)

    def find_spec(self, name: str, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Return the spec of a carried module.

        Implements a finder for the directory of a carried package, for `importlib.import_module(".part", __package__)`.
        """
        path = self._find(name)
        if path is None:
            return None
        me: Any = self
        spec = importlib.machinery.ModuleSpec(name, me, origin=_SOURCE_ROOT + path, is_package=_is_package(path))
        spec.has_location = True
        if _is_package(path):
            location = _SOURCE_ROOT + path.rpartition("/")[0]
            spec.submodule_search_locations = [location]
            sys.path_importer_cache[location] = me
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:  # noqa: ARG002
        """Implement the loader protocol: an ordinary module object is sufficient."""
        return

    def exec_module(self, module: ModuleType) -> None:
        """Implement the loader protocol: run the module piece by piece, so that other threads get the interpreter."""
        name, space = module.__name__, vars(module)
        space["__builtins__"] = self._builtins
        self._loading[name] = module
        try:
            for code in self._codes(self._files, self._path(name)):
                exec(code, space)  # noqa: S102  this is what a loader does
                self.rest()
            self._loaded[name] = sys.modules.get(name, module)  # the module may have replaced itself by another object
        finally:
            del self._loading[name]

    def rest(self) -> None:
        """Release the GIL for longer than hookd has held it since the last rest."""
        if self._gentle:
            _collect_young()
            busy_s = time.thread_time() - self._rested_at
            _sleep(min(max(_REST * busy_s, 0.001), 0.1))  # the last time may be from another thread's clock: limit it
            self._rested_at = time.thread_time()

    def get_source(self, name: str) -> str:
        """Return the source of a module, for `linecache` and tracebacks."""
        text = self._files[self._path(name)]
        return text.replace(_PIECE, b"\n").decode()  # `str.splitlines` splits at form feeds

    def is_package(self, name: str) -> bool:
        """Whether a module is a package."""
        return _is_package(self._find(name) or "")

    def get_data(self, path: str) -> bytes:
        """Return a payload file, by a path in the form of `__file__`."""
        try:
            return self._files[path[len(_SOURCE_ROOT) :]]
        except KeyError:
            raise OSError(f"{path} is not in hookd's payload") from None

    def _find(self, name: str) -> str | None:
        path = public(name).replace(".", "/")
        for candidate in (path + "/__init__.py", path + ".py"):
            if candidate in self._files:
                return candidate
        return None

    def _path(self, name: str) -> str:
        path = self._find(name)
        if path is None:
            raise ImportError(f"no module {name!r} in hookd's payload", name=name)
        return path


def _private(name: str) -> str:
    """Return the name in `sys.modules` of a carried module."""
    top, dot, rest = name.partition(".")
    return (_PRIVATE if top == "hookd" else f"{_PRIVATE}_{top}") + dot + rest


def public(name: str) -> str:
    """Return the name by which carried code imports a module; that of other modules stays the same."""
    top, dot, rest = name.partition(".")
    return ("hookd" if top == _PRIVATE else top.removeprefix(_PRIVATE + "_")) + dot + rest


def _withdraw(modules: Mapping[str, ModuleType]) -> None:
    """Remove modules from `sys.modules`, except names that now refer to other modules."""
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _collect_young() -> None:
    """Collect the youngest generation, before hookd's allocations cause a full collection.

    A full collection among the 286,000 objects of a small training stops it for 160 to 210 ms. In a young process one is nearly
    due, so the import of an agent would trigger it. If automatic collection is disabled, nothing is collected here.
    """
    threshold = gc.get_threshold()[0]
    if gc.isenabled() and 0 < threshold < 2 * gc.get_count()[0]:
        gc.collect(0)


def _top(path: str) -> str:
    """Return the top-level module that a path of the payload belongs to."""
    return path.partition("/")[0].partition(".")[0]


def _forget_lines(tops: Iterable[str] | None = None) -> None:
    """Remove carried sources from `linecache`, which tracebacks fill: all, or those of the top-level modules `tops`."""
    linecache = sys.modules.get("linecache")
    for path in list(getattr(linecache, "cache", ())):
        if path.startswith(_SOURCE_ROOT) and (tops is None or _top(path[len(_SOURCE_ROOT) :]) in tops):
            linecache.cache.pop(path, None)  # type: ignore[union-attr]


def _is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


class RefusalError(Exception):
    """A refusal that the tool reports as its error class `kind`. `hookd.errors` is not loaded here yet."""

    def __init__(self, kind: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.reason = kind, reason


def _sleep(seconds: float) -> None:
    """Sleep without `time.sleep`, which may have been replaced; `hookd/wire/originals.py` is loaded later."""
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415

    _signal.sigtimedwait((), seconds)


def is_acquired() -> bool:
    """Whether this process has an agent, of any copy of hookd."""
    import posix  # noqa: PLC0415

    owner: tuple[int, object] = sys.__dict__.get(AGENT_LOCK, (0, None))
    return owner[0] == posix.getpid()


def acquire() -> None:
    """Acquire this process, so that no other agent starts in it.

    The lock is in `sys`, because each agent brings its own modules: agents share only the interpreter.

    Raises:
        RefusalError: reason "already-attached".
    """
    import posix  # noqa: PLC0415

    mine = (posix.getpid(), object())
    there = sys.__dict__.setdefault(AGENT_LOCK, mine)
    if there is not mine and there[0] == mine[0]:  # ignore a lock that was inherited by a fork
        raise RefusalError("AttachError", "already-attached", "an agent runs in this process already")
    sys.__dict__[AGENT_LOCK] = mine


def release() -> None:
    """Release this process, so that another agent may start."""
    sys.__dict__.pop(AGENT_LOCK, None)


def start(config: AgentConfig, files: Mapping[str, bytes], codes: Codes) -> ModuleType:
    """Import the agent and start it; leave nothing behind if that fails.

    Returns:
        The module `hookd.target.boot.bootstrap`, which can stop the agent.

    Raises:
        HookdError: the agent refuses to start.
        RefusalError: the process has an agent already.
    """
    acquire()
    loader = None
    try:
        loader = Loader(files, codes, gentle=config.get("method") == "attach")
        if "__file__" not in globals():  # this module was executed without a loader, which tracebacks need
            globals()["__spec__"] = loader.find_spec(__name__)
        bootstrap = loader.module("hookd.target.boot.bootstrap")
        bootstrap.start(config, loader)
    except BaseException:
        if loader is not None:
            loader.purge()
        release()
        raise
    return bootstrap
