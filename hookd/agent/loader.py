"""Import the agent out of memory and start it. Runs in the target.

`arrival.py` executes this file before anything else of hookd is there, so it uses the standard library alone and imports
at the top only what every interpreter has loaded. `Loader` is then kept by the agent, which imports plugins through it
and purges it at detach.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import CodeType, ModuleType

    Codes = Callable[[Mapping[str, bytes], str], Iterable[CodeType]]

CLAIM = "_hookd_claim"
"""The attribute of `sys` that the one agent of a process has from before its first import until it has left."""
_SOURCE_ROOT = "/hookd-payload/"
_PIECE = b"\n\f\f\f"
"""What `hookd/attach/payload.py` has marked pieces with; the same as in `arrival.py`."""
_REST = 3.0
"""How much longer we leave the interpreter alone than we have just held it."""


class Loader:
    """Imports modules from sources held in memory, and can take all of them back.

    It claims `hookd`, everything below it and the top-level modules that it holds sources of; no other name. Modules
    of hookd's that were there before are put aside at the first import and come back with `purge`. Others have names
    that the training may want for a module of its own: they are importable only inside `importing`.

    Args:
        files: source by path, as in a zip: `hookd/__init__.py`.
        codes: gives the code of one of them, piece by piece (`codes` in `arrival.py`).
        gentle: whether somebody trains meanwhile, so that the interpreter must not be held for long.
    """

    def __init__(self, files: Mapping[str, bytes], codes: Codes, *, gentle: bool = False) -> None:
        self._files: dict[str, bytes] = {}
        self._codes = codes
        self._claimed: frozenset[str] = frozenset()
        self.add(files)
        self._gentle = gentle
        self._rested_at = time.thread_time()
        self._loaded: dict[str, ModuleType] = {}
        self._private: dict[str, ModuleType] = {}
        self._displaced: dict[str, ModuleType] = {}
        self._depth = 0

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Let imports be served from the payload first. Not to be entered by two threads at once.

        The list of finders is replaced and not changed: a thread of the training may be going through it, and would
        skip the next finder when we left ("No module named ..." in the middle of the training, once in 3,240 injections).
        """
        self._displace()
        for name, module in self._private.items():
            sys.modules.setdefault(name, module)
        if self._depth == 0:
            self._finders = sys.meta_path
            self._with_us = sys.meta_path = [self, *sys.meta_path]
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._step_back()

    def _step_back(self) -> None:
        """Put the list of finders back, with what others have done to it meanwhile; leave private names to the training."""
        self._private = {name: module for name, module in self._loaded.items() if not _is_hookds(name)}
        for name, module in self._private.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        others = [finder for finder in sys.meta_path if finder is not self]
        if sys.meta_path is not self._with_us:
            sys.meta_path = others
            return
        if others != self._finders:
            self._finders[:] = others
        sys.meta_path = self._finders

    def require_free(self, name: str) -> None:
        """Check that the training has no module that a plugin's would take the place of.

        Raises:
            ImportError: it has.
        """
        top = name.partition(".")[0]
        if not _is_hookds(top) and sys.modules.get(top) not in (None, self._loaded.get(top)):
            raise ImportError(f"the training has a module {top!r} of its own: give the plugin's file another name")

    def add(self, files: Mapping[str, str | bytes]) -> None:
        """Add or replace sources; modules already imported stay as they are."""
        for path, source in files.items():
            self._files[path] = source.encode() if isinstance(source, str) else bytes(source)
            if path.endswith(".py") and path + "c" not in files:
                self._files.pop(path + "c", None)  # of the old source
        self._claimed = frozenset(map(_top, self._files))

    @contextlib.contextmanager
    def renewing(self, files: Mapping[str, str | bytes]) -> Iterator[None]:
        """Add sources; of a top-level module with another source than before, import all anew inside of this.

        What was made of the old source goes on with it. Whatever leaves this puts everything back as it was.
        """
        before, tops = dict(self._files), self._renewed(files)
        old = self._taken_out(tops)
        for path in [path for path in before if _top(path) in tops]:
            del self._files[path]
        self.add(files)
        try:
            yield
        except BaseException:
            old, back = self._taken_out(tops), old
            self._files, self._claimed = before, frozenset(map(_top, before))
            self._loaded.update(back)
            self._private = {name: module for name, module in self._loaded.items() if not _is_hookds(name)}
            sys.modules.update({name: module for name, module in back.items() if _is_hookds(name)})
            raise
        finally:
            for name, module in old.items():
                self._let_go(name, module)

    def _renewed(self, files: Mapping[str, str | bytes]) -> set[str]:
        """Give the top-level modules that are held with another source, or with files that they have no more."""
        new: dict[str, dict[str, bytes]] = {}
        held: dict[str, dict[str, bytes]] = {}
        for sources, by_top in ((files, new), (self._files, held)):
            for path, source in sources.items():
                if path.endswith(".py"):  # the marks where it may be cut say nothing
                    text = source.encode() if isinstance(source, str) else bytes(source)
                    by_top.setdefault(_top(path), {})[path] = text.replace(b"\f", b"")
        return {top for top in new if top in held and held[top] != new[top]} - {"hookd"}

    def _taken_out(self, tops: set[str]) -> dict[str, ModuleType]:
        """Forget the modules below some top-level ones, and give them."""
        out = {name: self._loaded.pop(name) for name in list(self._loaded) if name.partition(".")[0] in tops}
        for name, module in out.items():
            self._private.pop(name, None)
            if sys.modules.get(name) is module:
                del sys.modules[name]
        _forget_lines(tops)
        return out

    def again(self, config: dict[str, Any]) -> None:
        """Start another agent from the same sources, imported anew: in a child that has been forked.

        Raises:
            HookdError: the agent's own, when it refuses.
        """
        start(config, self._files, self._codes)

    def purge(self) -> None:
        """Remove from sys.modules exactly what was loaded, and put back what had been displaced."""
        for name, module in list(self._loaded.items()):
            if sys.modules.get(name) is module:
                del sys.modules[name]
            self._let_go(name, module)
        # As CPython's own leak tests do (Lib/test/libregrtest/utils.py `clear_caches`): a generic class is kept by them.
        for clear in getattr(sys.modules.get("typing"), "_cleanups", ()):
            clear()
        self._loaded.clear()
        self._private.clear()
        self._files.clear()
        for name, module in self._displaced.items():
            sys.modules.setdefault(name, module)
        self._displaced.clear()
        _forget_lines()

    @staticmethod
    def _let_go(name: str, module: ModuleType) -> None:
        """Take away what ties a module to us: typing's caches keep some functions, which must not reach the payload."""
        getattr(sys.modules.get("typing"), "_overload_registry", {}).pop(name, None)
        for attribute in ("__loader__", "__spec__"):
            module.__dict__.pop(attribute, None)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Serve as a meta path finder."""
        top = name.partition(".")[0]
        if top not in self._claimed:  # asked by all threads that import something
            return None
        if not _is_hookds(top) and sys.modules.get(top) not in (None, self._loaded.get(top)):
            return None  # the training has one of its own, and uses it: never parts of two
        found = self._find(name)
        if found is None:  # never the rest of another hookd that is installed here
            raise ModuleNotFoundError(f"No module named {name!r} in hookd's payload", name=name)
        me: Any = self
        spec = importlib.machinery.ModuleSpec(name, me, origin=_SOURCE_ROOT + found, is_package=_is_package(found))
        spec.has_location = True
        if _is_package(found):
            spec.submodule_search_locations = [_SOURCE_ROOT + found.rpartition("/")[0]]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:  # noqa: ARG002
        """Serve as a loader: an ordinary module object will do."""
        return

    def exec_module(self, module: ModuleType) -> None:
        """Serve as a loader: run the module piece by piece, because others wait for the interpreter meanwhile."""
        name = module.__name__
        path = self._find(name)
        if path is None:
            raise ImportError(f"no module {name!r} in hookd's payload", name=name)
        self._loaded[name] = module
        for code in self._codes(self._files, path):
            exec(code, module.__dict__)  # noqa: S102  this is what a loader does
            self.rest()

    def rest(self) -> None:
        """Let the training thread have the interpreter, for longer than we have had it since the last rest."""
        if self._gentle:
            _collect_young()
            busy_s = time.thread_time() - self._rested_at
            time.sleep(min(max(_REST * busy_s, 0.001), 0.1))  # another thread's clock may show anything
            self._rested_at = time.thread_time()

    def get_source(self, name: str) -> str:
        """Give the source of a module: `linecache` asks, so that tracebacks show it."""
        path = self._find(name)
        if path is None:
            raise ImportError(f"no module {name!r} in hookd's payload", name=name)
        return self._files[path].replace(_PIECE, b"\n").decode()  # `str.splitlines` takes a form feed for a line's end

    def is_package(self, name: str) -> bool:
        """Say whether a module is a package."""
        return _is_package(self._find(name) or "")

    def get_data(self, path: str) -> bytes:
        """Give a file of the payload by the path that `__file__` is relative to."""
        try:
            return self._files[path[len(_SOURCE_ROOT) :]]
        except KeyError:
            raise OSError(f"{path} is not in hookd's payload") from None

    def _find(self, name: str) -> str | None:
        path = name.replace(".", "/")
        for candidate in (path + "/__init__.py", path + ".py"):
            if candidate in self._files:
                return candidate
        return None

    def _displace(self) -> None:
        for name in list(sys.modules):
            module = sys.modules.get(name)
            if _is_hookds(name) and module is not None and self._loaded.get(name) is not module:
                self._displaced[name] = module
                del sys.modules[name]


def _collect_young() -> None:
    """Look at what we have just allocated, before there is so much that the interpreter looks at all there is.

    A full collection among the 286,000 objects of a small training stops it for 160 to 210 ms, and in a young process
    one is nearly due: the import of an agent was the last straw. Where nothing collects by itself, we do not either.
    """
    threshold = gc.get_threshold()[0]
    if gc.isenabled() and 0 < threshold < 2 * gc.get_count()[0]:
        gc.collect(0)


def _top(path: str) -> str:
    """Give the top-level module that a path of the payload belongs to."""
    return path.partition("/")[0].partition(".")[0]


def _forget_lines(tops: Iterable[str] | None = None) -> None:
    """Take our sources, or those of some top-level modules, out of what tracebacks have read."""
    linecache = sys.modules.get("linecache")
    for path in list(getattr(linecache, "cache", ())):
        if path.startswith(_SOURCE_ROOT) and (tops is None or _top(path[len(_SOURCE_ROOT) :]) in tops):
            linecache.cache.pop(path, None)  # type: ignore[union-attr]


def _is_hookds(name: str) -> bool:
    return name.partition(".")[0].partition("_")[0] == "hookd"


def _is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


class RefusalError(Exception):
    """A refusal that is told as the tool's error `kind`: hookd.errors is not there yet."""

    def __init__(self, kind: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.reason = kind, reason


def claim() -> None:
    """Keep every other agent out of this process. Each brings modules of its own: only the interpreter is in common.

    Raises:
        RefusalError: reason "already-attached".
    """
    import os  # noqa: PLC0415

    mine = (os.getpid(), object())
    there = sys.__dict__.setdefault(CLAIM, mine)
    if there is not mine and there[0] == mine[0]:  # one that a fork has inherited is nobody's
        raise RefusalError("AttachError", "already-attached", "an agent runs in this process already")
    sys.__dict__[CLAIM] = mine


def release() -> None:
    """Let the next agent in."""
    sys.__dict__.pop(CLAIM, None)


def start(config: dict[str, Any], files: Mapping[str, bytes], codes: Codes) -> Loader:
    """Import the agent and start it; leave nothing behind if it cannot.

    Raises:
        HookdError: the agent's own, when it refuses; RefusalError when another is there.
    """
    claim()
    loader = None
    try:
        loader = Loader(files, codes, gentle=config.get("method") == "attach")
        with loader.importing():
            from hookd.agent import bootstrap  # noqa: PLC0415

            bootstrap.start(config, loader)
    except BaseException:
        if loader is not None:
            loader.purge()
        release()
        raise
    return loader
