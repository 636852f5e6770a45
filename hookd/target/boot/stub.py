"""The stub: waits for torch, loads the payload, and reports the result.

The *text* of this file is injected and executed on its own thread before any other code of hookd is loaded. So it uses only
the standard library, and its top level imports only modules that every interpreter has loaded. Under `hookd run`,
`sitecustomize` executes it and uses only `start`.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib.util
import json
import marshal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType

    from hookd.wire.agent import AgentConfig, Message, Started

_SOURCE_ROOT = "/hookd-payload/"
_LOADER = "hookd/target/boot/loader.py"
_PIECE = b"\n\f\f\f"
"""The separator of pieces of a source, set by `hookd/tool/attach/payload.py`."""
_POLL_S = 0.002
_BREATH_S = 0.01


def start(config: AgentConfig, archive: bytes, breath_s: float = 0.0) -> Any:
    """Start the agent from a payload.

    Args:
        config: configuration of the agent.
        archive: the payload's bytes.
        breath_s: for how long to leave the interpreter to the training between two pieces of the loader, in s.

    Returns:
        The module that can stop the agent, as `start` of the loader returns it.

    Raises:
        HookdError: the agent refuses to start.
        RefusalError: the process has an agent already (the loader's class).
    """
    files = unpack(archive)
    loader: dict[str, Any] = {"__name__": "_hookd.target.boot.loader"}
    for code in codes(files, _LOADER):
        exec(code, loader)  # noqa: S102  this is how the loader is imported
        sleep(breath_s)
    return loader["start"](config, files, codes)


def sleep(seconds: float) -> None:
    """Sleep without `time.sleep`, which may have been replaced (see `hookd/wire/originals.py`).

    `SimpleQueue.get` is not an alternative: its lock is free at first, and a thread that takes it and then loses its processor
    for longer than the timeout waits forever (CPython 3.11 Modules/_queuemodule.c: a timeout below 0).
    """
    import _signal  # type: ignore[import-not-found]  # noqa: PLC0415

    _signal.sigtimedwait((), seconds)


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the contents of a payload by path."""
    files: dict[str, bytes] = marshal.loads(archive)  # noqa: S302  from our own tool
    return files


def codes(files: Mapping[str, bytes], path: str) -> Iterator[CodeType]:
    """Yield the code of a module's pieces. The tool has compiled it if its Python has the same bytecode."""
    compiled = files.get(path + "c", b"")
    if compiled.startswith(importlib.util.MAGIC_NUMBER):
        yield from marshal.loads(compiled[len(importlib.util.MAGIC_NUMBER) :])  # noqa: S302  from our own tool
        return
    flags = line = 0
    for piece in files[path].split(_PIECE):
        code = compile(b"\n" * line + piece, _SOURCE_ROOT + path, "exec", flags, dont_inherit=True)
        yield code
        flags |= code.co_flags & __future__.annotations.compiler_flag
        line += piece.count(b"\n") + 1


class _Mailbox:
    """The target's side of the mailbox; `hookd/tool/inject/mailbox.py` explains the offsets."""

    def __init__(self, fd: int | None, base: int) -> None:
        self._fd, self._base = fd, base
        self._opened = None if fd is None else self._identity(fd)

    @staticmethod
    def _identity(fd: int) -> tuple[int, int]:
        import posix  # noqa: PLC0415

        status = posix.fstat(fd)
        return status.st_dev, status.st_ino

    def read(self, offset: int, size: int) -> bytes:
        if self._fd is not None:
            import posix  # noqa: PLC0415

            return posix.pread(self._fd, size, self._base + offset)
        import ctypes  # noqa: PLC0415

        return ctypes.string_at(self._base + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        if self._fd is not None:
            import posix  # noqa: PLC0415

            posix.pwrite(self._fd, data, self._base + offset)
            return
        import ctypes  # noqa: PLC0415

        ctypes.memmove(self._base + offset, data, len(data))

    def word(self, offset: int) -> int:
        return int.from_bytes(self.read(offset, 8), "little")

    def answer(self, value: Started) -> None:
        data = json.dumps(value).encode()[:65536]
        self.write(4096, data)
        self.write(80, len(data).to_bytes(8, "little"))

    def wait_until_seen(self, timeout_s: float) -> bool:
        for _ in range(int(timeout_s / _POLL_S)):  # counted, because a clock may be frozen
            if self.word(24) or self.is_cancelled():
                break
            sleep(_POLL_S)
        return self.word(24) != 0

    def is_cancelled(self) -> bool:
        return self.word(32) != 0

    def close(self) -> None:
        """Free the memory of the mailbox. The first page stays if code in it may still be queued."""
        size = self.word(40)
        keep = 0 if self.word(8) == self.word(64) else 4096
        if self._fd is not None:
            import posix  # noqa: PLC0415

            # The program may have closed this descriptor, and use its number for another file.
            with contextlib.suppress(OSError):
                if self._identity(self._fd) == self._opened:
                    posix.close(self._fd)
        if not self._base:
            return
        import ctypes  # noqa: PLC0415

        # By index: an attribute access would leave the function behind in `ctypes.pythonapi`.
        munmap = ctypes.pythonapi["munmap"]
        munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        munmap(self._base + keep, size - keep)


def run(data: bytes, fd: int | None, base: int) -> None:
    """Serve one request: start the agent, or report why not.

    Runs on the injected thread, which then ends. `threading` did not start this thread. Once code asks `threading` for its
    name, it would stay in the list of threads forever.

    Args:
        data: length and JSON of the request, then the payload.
        fd: descriptor of the mailbox if that is a file, else None.
        base: address of the mailbox, or its offset in the file.
    """
    box = _Mailbox(fd, base)
    length = int.from_bytes(data[:8], "little")
    request = json.loads(data[8 : 8 + length])
    try:
        archive = data[8 + length :]
        refusal = _disabled() or _wait_for_trainer(box, request)
    except BaseException as exc:  # noqa: BLE001  reported to the tool
        refusal = _failure(exc)
    if refusal is not None:
        _finish(box, request, refusal)
        return
    try:
        _serve(box, request, archive)
    finally:
        import threading  # noqa: PLC0415  torch has imported it; `threading` takes its first importer for the main thread

        ident = threading.get_ident()
        if isinstance(threading._active.get(ident), threading._DummyThread):  # type: ignore[attr-defined]
            threading._active.pop(ident, None)  # type: ignore[attr-defined]


def _serve(box: _Mailbox, request: Message, archive: bytes) -> None:
    sleep(_BREATH_S)  # before reading the payload, which holds the interpreter for as long as the work before it
    if box.is_cancelled():  # an import lock was held for longer than the tool waits
        box.close()
        return
    try:
        agent = start(request["config"], archive, _BREATH_S)
    except BaseException as exc:  # noqa: BLE001  reported to the tool
        _finish(box, request, _failure(exc))
    else:
        _finish(box, request, {"ok": True}, agent)


def _finish(box: _Mailbox, request: Message, answer: Started, agent: Any = None) -> None:
    try:
        box.answer(answer)
        is_seen = box.wait_until_seen(request["wait_s"])
        if agent is not None and box.is_cancelled():  # the tool has reported that the attach failed
            agent.stop()
        elif agent is not None and not is_seen:
            agent.orphan()
    except Exception:  # noqa: BLE001, S110  the agent has left already; nobody listens, and stderr belongs to the program
        pass
    finally:
        box.close()


def _disabled() -> Started | None:
    """Return a refusal if HOOKD_DISABLE is set in the environment.

    It may be set now, or have been set at the start of the process. The initial environment may not be readable from
    outside.
    """
    import posix  # noqa: PLC0415
    from os import environ  # noqa: PLC0415

    name = "HOOKD_DISABLE"
    if {posix.environ.get(name.encode(), b""), environ.get(name, "")} <= {b"", b"0", "", "0"}:
        return None
    hint = "HOOKD_DISABLE is set in its environment: whoever started it does not want hookd there."
    return _refusal("TargetUnsupported", "disabled", "hookd is disabled in this process", hint=hint)


def _wait_for_trainer(box: _Mailbox, request: Message) -> Started | None:
    """Wait until torch is imported and the process's work is known.

    The work of a child of multiprocessing is not known at first. The patch needs nn.Module, and must not be the first to
    import it.

    Returns:
        A refusal, or None if the agent may start.
    """
    left = int(request["timeout_s"] / _POLL_S)
    while not _torch_is_imported():
        if box.is_cancelled() or not left:
            return _refusal("TargetUnsupported", "no-torch", "torch is not imported in this process")
        sleep(_POLL_S)
        left -= 1
    while request["only_trainers"] and _work() is None and not box.is_cancelled() and left:
        sleep(_POLL_S)  # a child that was just spawned does not know its work yet
        left -= 1
    if request["only_trainers"] and (_work() or "").startswith("torch.utils.data."):
        return _refusal("TargetUnsupported", "data-worker", "the process is a data loader's worker")
    return None


def _work() -> str | None:
    """Return the module of a multiprocessing child's function: None if it has not begun, "" in other processes."""
    process = sys.modules.get("multiprocessing.process")
    target = getattr(process.current_process(), "_target", None) if process is not None else None
    words = "".join(getattr(sys, "orig_argv", ()))
    if target is None and ("--multiprocessing-fork" in words or "multiprocessing.forkserver" in words):
        return None
    return getattr(target, "__module__", None) or ""


def _torch_is_imported() -> bool:
    """Whether `import torch` is complete in this process."""
    return all(_is_imported(name) for name in ("torch.nn.modules.module", "torch"))


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _failure(exc: BaseException) -> Started:
    if isinstance(exc, MemoryError):
        hint = "Raise its RLIMIT_AS or RLIMIT_DATA, or the limit of its container or job."
        return _refusal("AttachError", "no-memory", "the process gets no memory for an agent", hint=hint)
    reason = getattr(exc, "reason", None)
    if not isinstance(reason, str):
        return _refusal("AttachError", "agent-failed", _traceback(exc))
    kind = getattr(exc, "kind", type(exc).__name__)
    return _refusal(kind, reason, str(exc), str(getattr(exc, "hint", "")))


def _refusal(kind: str, reason: str, message: str, hint: str = "") -> Started:
    return {"ok": False, "kind": kind, "reason": reason, "message": message, "hint": hint}


def _traceback(exc: BaseException) -> str:
    import traceback  # noqa: PLC0415

    return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))[-4000:]
