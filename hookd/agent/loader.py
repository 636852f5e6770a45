"""Load the payload out of memory, start the agent, tell the tool how it went. Runs in the target.

This file's *source* is what is injected: it is executed on a thread of its own before anything of hookd is there, so
it uses the standard library alone and imports at the top only what every interpreter has loaded. `Loader` is then
kept by the agent, which imports plugins through it and purges it at detach.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib.machinery
import importlib.util
import json
import marshal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType, ModuleType

CLAIM = "_hookd_claim"
"""The attribute of `sys` that the one agent of a process has from before its first import until it has left."""
_SOURCE_ROOT = "/hookd-payload/"
_POLL_S = 0.002
_PIECE = b"\n\f\f\f"
"""Where `hookd/attach/payload.py` has marked that a source may be cut."""
_BREATH_S = 0.01
_REST = 3.0
"""How much longer we leave the interpreter alone than we have just held it."""


class Loader:
    """Imports modules from sources held in memory, and can take all of them back.

    It claims `hookd`, everything below it and the top-level modules that it holds sources of; no other name. Modules
    of those names that were there before are put aside at the first import and come back with `purge`.

    Args:
        files: source by path, as in a zip: `hookd/__init__.py`.
        gentle: whether somebody trains meanwhile, so that the interpreter must not be held for long.
    """

    def __init__(self, files: Mapping[str, bytes], *, gentle: bool = False) -> None:
        self._files: dict[str, bytes] = {}
        self._claimed: frozenset[str] = frozenset()
        self.add(files)
        self._gentle = gentle
        self._rested_at = time.thread_time()
        self._loaded: dict[str, ModuleType] = {}
        self._displaced: dict[str, ModuleType] = {}
        self._depth = 0

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Let imports be served from the payload first. Not to be entered by two threads at once.

        The list of finders is replaced and not changed: a thread of the training may be going through it, and would
        skip the next finder when we left ("No module named ..." in the middle of the training, once in 3,240 injections).
        """
        self._displace()
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
        """Put the list of finders back, with what others have done to it meanwhile."""
        others = [finder for finder in sys.meta_path if finder is not self]
        if sys.meta_path is not self._with_us:
            sys.meta_path = others
            return
        if others != self._finders:
            self._finders[:] = others
        sys.meta_path = self._finders

    def add(self, files: Mapping[str, str | bytes]) -> None:
        """Add or replace sources; modules already imported stay as they are."""
        for path, source in files.items():
            self._files[path] = source.encode() if isinstance(source, str) else bytes(source)
            if path.endswith(".py") and path + "c" not in files:
                self._files.pop(path + "c", None)  # of the old source
        self._claimed = frozenset(path.partition("/")[0].partition(".")[0] for path in self._files)

    def again(self, config: dict[str, Any]) -> None:
        """Start another agent from the same sources, imported anew: in a child that has been forked.

        Raises:
            HookdError: the agent's own, when it refuses.
        """
        start_from(config, self._files)

    def purge(self) -> None:
        """Remove from sys.modules exactly what was loaded, and put back what had been displaced."""
        overloads = getattr(sys.modules.get("typing"), "_overload_registry", {})
        for name, module in list(self._loaded.items()):
            if sys.modules.get(name) is module:
                del sys.modules[name]
            # Caches of typing's keep some of our functions; what those can reach must not be the whole payload.
            overloads.pop(name, None)
            for attribute in ("__loader__", "__spec__"):
                module.__dict__.pop(attribute, None)
        # As CPython's own leak tests do (Lib/test/libregrtest/utils.py `clear_caches`): a generic class is kept by them.
        for clear in getattr(sys.modules.get("typing"), "_cleanups", ()):
            clear()
        self._loaded.clear()
        self._files.clear()
        for name, module in self._displaced.items():
            sys.modules.setdefault(name, module)
        self._displaced.clear()
        linecache = sys.modules.get("linecache")
        for path in list(getattr(linecache, "cache", ())):
            if path.startswith(_SOURCE_ROOT):
                linecache.cache.pop(path, None)  # type: ignore[union-attr]

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Serve as a meta path finder."""
        if name.partition(".")[0] not in self._claimed:  # asked by all threads that import something
            return None
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
        for code in self._codes(path):
            exec(code, module.__dict__)  # noqa: S102  this is what a loader does
            self.rest()

    def _codes(self, path: str) -> Iterator[CodeType]:
        """Give the code of a module's pieces: as the tool has compiled it if its Python was like ours."""
        compiled = self._files.get(path + "c", b"")
        if compiled.startswith(importlib.util.MAGIC_NUMBER):
            yield from marshal.loads(compiled[len(importlib.util.MAGIC_NUMBER) :])  # noqa: S302  from our own tool
            return
        flags = line = 0
        for piece in self._files[path].split(_PIECE):
            code = compile(b"\n" * line + piece, _SOURCE_ROOT + path, "exec", flags, dont_inherit=True)
            yield code
            flags |= code.co_flags & __future__.annotations.compiler_flag
            line += piece.count(b"\n") + 1

    def rest(self) -> None:
        """Let the training thread have the interpreter, for longer than we have had it since the last rest."""
        if self._gentle:
            busy_s = time.thread_time() - self._rested_at
            time.sleep(min(max(_REST * busy_s, 0.001), 0.1))  # another thread's clock may show anything
            self._rested_at = time.thread_time()

    def get_source(self, name: str) -> str:
        """Give the source of a module: `linecache` asks, so that tracebacks show it."""
        path = self._find(name)
        if path is None:
            raise ImportError(f"no module {name!r} in hookd's payload", name=name)
        return self._files[path].decode()

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
            if name.partition(".")[0] in self._claimed and module is not None and self._loaded.get(name) is not module:
                self._displaced[name] = module
                del sys.modules[name]


def _is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


def unpack(archive: bytes) -> dict[str, bytes]:
    """Read a payload's zip."""
    import io  # noqa: PLC0415
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


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


def start(config: dict[str, Any], archive: bytes) -> Loader:
    """Import the agent from the payload and start it; leave nothing behind if it cannot.

    Raises:
        HookdError: the agent's own, when it refuses; RefusalError when another is there.
    """
    return start_from(config, unpack(archive))


def start_from(config: dict[str, Any], files: Mapping[str, bytes]) -> Loader:
    """Do the same with sources that are unpacked."""
    claim()
    loader = None
    try:
        loader = Loader(files, gentle=config.get("method") == "attach")
        with loader.importing():
            from hookd.agent import bootstrap  # noqa: PLC0415

            bootstrap.start(config, loader)
    except BaseException:
        if loader is not None:
            loader.purge()
        release()
        raise
    return loader


class _Mailbox:
    """The target's side of `hookd/attach/mailbox.py`, where the offsets are explained."""

    def __init__(self, fd: int | None, base: int) -> None:
        self._fd, self._base = fd, base

    def read(self, offset: int, size: int) -> bytes:
        if self._fd is not None:
            import os  # noqa: PLC0415

            return os.pread(self._fd, size, self._base + offset)
        import ctypes  # noqa: PLC0415

        return ctypes.string_at(self._base + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        if self._fd is not None:
            import os  # noqa: PLC0415

            os.pwrite(self._fd, data, self._base + offset)
            return
        import ctypes  # noqa: PLC0415

        ctypes.memmove(self._base + offset, data, len(data))

    def word(self, offset: int) -> int:
        return int.from_bytes(self.read(offset, 8), "little")

    def answer(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()[:65536]
        self.write(4096, data)
        self.write(80, len(data).to_bytes(8, "little"))

    def wait_until_seen(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self.word(24) and not self.is_cancelled() and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self.word(24) != 0

    def is_cancelled(self) -> bool:
        return self.word(32) != 0

    def close(self) -> None:
        """Give the memory back; the first page stays if code in it may still be queued."""
        size = self.word(40)
        keep = 0 if self.word(8) == self.word(64) else 4096
        if self._fd is not None:
            import os  # noqa: PLC0415

            os.close(self._fd)
        if not self._base:
            return
        import ctypes  # noqa: PLC0415

        # By index: an attribute access would leave the function behind in `ctypes.pythonapi`.
        munmap = ctypes.pythonapi["munmap"]
        munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        munmap(self._base + keep, size - keep)


def run(data: bytes, fd: int | None, base: int) -> None:
    """Do all of the above for one request. Runs on the injected thread, which ends when the agent is to be loaded.

    Args:
        data: length and JSON of the request, then the zip.
        fd: where the mailbox is a file, else None.
        base: where it starts.
    """
    box = _Mailbox(fd, base)
    length = int.from_bytes(data[:8], "little")
    request = json.loads(data[8 : 8 + length])
    try:
        deadline = time.monotonic() + request["timeout_s"]
        _wait_for_torch(box, deadline)
        if request["only_trainers"]:
            _refuse_worker(box, deadline)
    except RefusalError as exc:
        _finish(box, request, _failure(exc))
        return
    # A thread that `threading` did not start appears in its list of threads for ever, once somebody asks for its name.
    # Only now: whoever imports `threading` first is taken for the main thread, but torch has imported it.
    import threading  # noqa: PLC0415

    arguments = (box, request, data[8 + length :])
    before = threading.stack_size(0)  # not what the program has chosen for its own threads: that may be too little
    try:
        threading.Thread(target=_serve, args=arguments, name="hookd-attach", daemon=True).start()
    finally:
        threading.stack_size(before)


def _serve(box: _Mailbox, request: dict[str, Any], archive: bytes) -> None:
    time.sleep(_BREATH_S)  # reading the payload takes as long as compiling this file did a moment ago
    if box.is_cancelled():  # an import lock was held for longer than the tool waited
        box.close()
        return
    try:
        start(request["config"], archive)
    except BaseException as exc:  # noqa: BLE001  told to the tool
        _finish(box, request, _failure(exc))
    else:
        _finish(box, request, {"ok": True}, sys.modules["hookd.agent.bootstrap"])


def _finish(box: _Mailbox, request: dict[str, Any], answer: dict[str, Any], agent: Any = None) -> None:
    try:
        box.answer(answer)
        is_seen = box.wait_until_seen(request["wait_s"])
        if agent is not None and box.is_cancelled():  # the tool has told its user that the attach failed
            agent.stop()
        elif agent is not None and not is_seen:
            agent.orphan()
    except Exception:  # noqa: BLE001, S110  the agent has left already; nobody listens, and stderr is the program's
        pass
    finally:
        box.close()


def _wait_for_torch(box: _Mailbox, deadline: float) -> None:
    """Wait until `import torch` is over: the patch needs nn.Module, and must not be the one to import it."""
    while not torch_is_imported():
        if box.is_cancelled() or time.monotonic() > deadline:
            raise RefusalError("TargetUnsupported", "no-torch", "torch is not imported in this process")
        time.sleep(_POLL_S)


def _refuse_worker(box: _Mailbox, deadline: float) -> None:
    """Refuse a data loader's worker. One that was spawned a moment ago does not know yet what it is to do."""
    while (work := _work()) is None and not box.is_cancelled() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if (work or "").startswith("torch.utils.data."):
        raise RefusalError("TargetUnsupported", "data-worker", "the process is a data loader's worker")


def _work() -> str | None:
    """Give the module of what a child of multiprocessing does; None if it has not begun, "" if it is no such child."""
    process = sys.modules.get("multiprocessing.process")
    target = getattr(process.current_process(), "_target", None) if process is not None else None
    words = "".join(getattr(sys, "orig_argv", ()))
    if target is None and ("--multiprocessing-fork" in words or "multiprocessing.forkserver" in words):
        return None
    return getattr(target, "__module__", None) or ""


def torch_is_imported() -> bool:
    """Say whether `import torch` has been completed here."""
    return all(_is_imported(name) for name in ("torch.nn.modules.module", "torch"))


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


class RefusalError(Exception):
    """A refusal that is told as the tool's error `kind`: hookd.errors may not be there yet."""

    def __init__(self, kind: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.reason = kind, reason


def _failure(exc: BaseException) -> dict[str, Any]:
    reason = getattr(exc, "reason", None)
    if not isinstance(reason, str):
        return {"ok": False, "kind": "AttachError", "reason": "agent-failed", "message": _traceback(exc), "hint": ""}
    kind = getattr(exc, "kind", type(exc).__name__)
    return {"ok": False, "kind": kind, "reason": reason, "message": str(exc), "hint": str(getattr(exc, "hint", ""))}


def _traceback(exc: BaseException) -> str:
    import traceback  # noqa: PLC0415

    return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))[-4000:]
