"""Traces of some steps: torch's profiler, with a span for each module call.

The control thread takes the request and prepares the trace. The training thread begins and ends the recording, each at the end
of an optimizer step. A background thread writes the file and unlinks it. Tools read it through `/proc/PID/fd`, as they read the
page, so that neither namespaces nor directory permissions interfere.
"""

from __future__ import annotations

import ctypes
import json
import posix
import secrets
from os import environ
from typing import TYPE_CHECKING, Any

import torch

from hookd._pluggy import HookimplMarker
from hookd.api.plugin import Plugin
from hookd.errors import ControlError, HookdError, worded
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.target.remote import profiler
from hookd.target.tensors import torch_state
from hookd.wire.descriptors import Descriptor, moved_up, read, real_path
from hookd.wire.originals import Local, RLock, clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.api.events import Module
    from hookd.target.boot.identity import Process
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.background import Background
    from hookd.target.plugins.listeners import Registry
    from hookd.target.plugins.loading import Loading
    from hookd.wire.agent import Request, TraceFailure, TraceState

hookimpl = HookimplMarker("hookd")
_Span: Any = getattr(
    getattr(torch._C, "_profiler", None), "_RecordFunctionFast", torch.autograd.profiler.record_function
)
"""A span of torch's profiler, without an operator that a dispatch mode would see (2.1+)."""
MOST_STEPS = 10_000
GROWTH = 0.5
"""The target's memory may grow by this share of the trace's requested size limit. Torch keeps 100 bytes per event while it
records and 1,100 when the recording ends; in the trace an event takes 250 (torch 2.13)."""
HANDOVER_S = 2.0
"""How long a detach waits for the training thread to end the recording."""
QUEUED_S = 1.0
"""How long a detach then waits for the main thread to end it, in a pending call."""
_FOLDERS = ("TMPDIR", "/tmp", "/var/tmp", "XDG_RUNTIME_DIR", "/dev/shm", "/run")  # noqa: S108


class Spans(Plugin):
    """Records a span in torch's profiler for each module call and each phase of a thread.

    Attributes:
        is_on: whether a recording is in progress.
    """

    name = "trace"
    longest = 1

    def __init__(self) -> None:
        self.is_on = False
        self._open: dict[int, Any] = {}
        self._local = _Open(self._open)

    def stop(self) -> None:
        """Begin no more spans, and never end the open ones."""
        self.is_on = False
        # The end of a span writes to its recording even if that memory has been freed, as soon as another recording is in
        # progress, be it the training's. So the open spans are leaked.
        for span in list(self._open.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(span))
        self._open.clear()

    @hookimpl(trylast=True)
    def forward_pre(self, module: Module, recompute: bool) -> None:
        """Begin a span, as the last hook before the call."""
        if self.is_on:
            self._local.begin(f"{'recompute' if recompute else 'module'} {_clean(module.name)}", module.id)

    @hookimpl(tryfirst=True)
    def forward(self, module: Module, recompute: bool) -> None:  # noqa: ARG002  asks for recomputes too
        """End the span, as the first hook after the call."""
        self._local.end(module.id)

    @hookimpl(tryfirst=True)
    def forward_error(self, module: Module) -> None:
        """End the span of a call that raised."""
        self._local.end(module.id)

    @hookimpl
    def phase(self, name: str) -> None:
        """Begin or end a phase; a phase inside another one is a nested span."""
        if name in ("other", "paused"):
            self._local.end_phases()
        elif self._local.is_inside(name):
            self._local.end_phases(name)
        elif self.is_on:
            self._local.begin(f"phase {name}", name)


class _Open(Local):
    """The open spans of the calling thread, outermost first, each with its key: a module's number or a phase."""

    def __init__(self, open_spans: dict[int, Any]) -> None:
        self._open = open_spans
        self._spans: list[tuple[Any, Any]] = []

    def begin(self, text: str, key: Any) -> None:
        span = _Span(text)
        span.__enter__()
        self._open[id(span)] = span
        self._spans.append((key, span))

    def end(self, key: Any) -> None:
        """End the innermost span of `key`, if there is one, and any spans left open inside it."""
        if self.is_inside(key):
            while self._pop() != key:
                pass

    def is_inside(self, key: Any) -> bool:
        return any(span == key for span, _ in self._spans)

    def end_phases(self, down_to: str = "") -> None:
        """End the thread's open phases, except the phase `down_to` and those around it."""
        for key in [key for key, _ in self._spans if isinstance(key, str)][::-1]:
            if key == down_to:
                return
            self.end(key)

    def _pop(self) -> Any:
        key, span = self._spans.pop()
        if self._open.pop(id(span), None) is not None:
            span.__exit__(None, None, None)
        return key


class Tracing:
    """The trace in progress, if any.

    Attributes:
        state: idle, waiting (for a step to end), tracing, saving, done or failed. Only the control thread sets waiting and
            idle; the training thread, and any caller that ends the recording, set the others.
        residue: descriptions of what could not be undone.
    """

    def __init__(
        self, *, process: Process, count: StepCount, loading: Loading, registry: Registry, background: Background
    ) -> None:
        self._process, self._count, self._loading = process, count, loading
        self._registry, self._background = registry, background
        self.residue: list[str] = []
        self.state = "idle"
        self._spans = Spans()
        self._profiler = profiler.Profiler(self._yielded)
        self._asked_by: Any = None
        self._clearing = RLock()  # a signal handler may detach while its own thread holds it
        self._clear()

    def _clear(self) -> None:
        self._steps = self._done = self._first = self._rss = self._most_bytes = 0
        self._turns: list[bool] = []
        self._error: HookdError | None = None
        self._file: Descriptor | None = None
        self._pause_s = 0.0

    # -- in the control thread

    def operations(self, asking: Callable[[], Any]) -> dict[str, Callable[[Request], Mapping[str, object]]]:
        """Return the operations for the control socket; `asking` returns the requesting connection."""
        return {"trace": lambda request: self._ask(request, asking()), "trace_state": self._state}

    def _ask(self, request: Request, connection: Any) -> Mapping[str, object]:
        """Prepare a trace of `steps` steps and up to `max_bytes`; it is abandoned when the connection ends."""
        if self.state != "idle":
            raise ControlError("a trace is being taken already", reason="busy", hint="Try again when it is done.")
        steps, most_bytes = request.get("steps"), request.get("max_bytes")
        if not isinstance(steps, int) or not 0 < steps <= MOST_STEPS or not isinstance(most_bytes, int):
            raise ControlError(f"a trace has 1 to {MOST_STEPS} steps and a size", reason="bad-request")
        if not torch.autograd.kineto_available():  # type: ignore[attr-defined]
            raise ControlError("this build of torch has no profiler (Kineto)", reason="no-profiler")
        self._clear()
        self._spans = Spans()
        self._profiler.guard()
        try:
            self._loading.load(self._spans, {}, by_name=True)
        except BaseException:
            self._profiler.release()
            raise
        self._steps, self._most_bytes, self._asked_by = steps, most_bytes, connection
        self._turns = [True]
        self.state = "waiting"
        return {"state": self.state}

    def _state(self, _request: Request) -> TraceState:
        error = self._error
        failure: TraceFailure | None = None if error is None else {"kind": type(error).__name__, **error.as_json()}
        if self._file is not None and not self._file.is_ours():
            self._file = None
            self._fail(ControlError("the program has closed the file of the trace", reason="trace-closed"))
        fd, bytes_ = (-1, 0) if self._file is None else (self._file.number, posix.fstat(self._file.number).st_size)
        return {"state": self.state, "steps": self._done, "first": self._first, "fd": fd, "bytes": bytes_,
                "pause_s": self._pause_s, "failure": failure, "all_threads": self._profiler.covers_all_threads}  # fmt: skip

    def left(self, connection: Any) -> None:
        """Abandon the trace if the connection that requested it has closed."""
        if connection is self._asked_by:
            self.abandon()

    def abandon(self) -> None:
        """End the trace in progress, without a result."""
        if self.state == "idle":
            return
        self._asked_by = None
        self._yield_to_training()
        self._take()
        self._spans.stop()
        self._profiler.end(wait=False)
        if self._profiler.is_on:  # only the thread that began it can end it
            self._profiler.end_in_main_thread()
            self._wait(QUEUED_S)
        self._background.finish(HANDOVER_S, Spans.name)
        with self._clearing:  # a detach and the end of the connection may come at once, in two threads
            if self.state != "idle":
                self._remove()

    def _remove(self) -> None:
        """Return what the trace has used to the process, in one thread at a time: a file must not be closed twice."""
        try:
            self.residue += self._profiler.release()
            if self._registry.has(Spans.name):
                self._loading.unload(Spans.name)
            if self._file is not None:
                self._file.close()
                self._file = None
        finally:
            self.state = "idle"  # last: from here on nothing of this trace is left

    def _yield_to_training(self) -> None:
        """Wait for the training thread to end the recording at the end of its next step.

        If another thread ended it, torch would not wait for training code that runs without the interpreter's lock and still
        uses the recording. Without `profile_all_threads` (torch 2.6) no other thread can end it.
        """
        self._wait(HANDOVER_S)

    def _wait(self, limit_s: float) -> None:
        deadline = clock.monotonic() + limit_s
        while self._profiler.is_on and not self._profiler.is_own_thread() and clock.monotonic() < deadline:
            clock.sleep(0.01)

    def _take(self) -> bool:
        """Whether the caller is the one to end the recording; True only once."""
        try:  # a list's pop is atomic
            return self._turns.pop()
        except IndexError:
            return False

    # -- in the training thread

    def boundary(self) -> None:
        """Begin or end the recording if it is due, at the end of an optimizer step."""
        if self.state == "idle":
            if self._profiler.is_on and self._profiler.is_own_thread():  # abandoned, and no other thread could end it
                self._profiler.end(wait=False)
            return
        if torch_state.is_unreal():  # waiting for the device would break the capture of a CUDA graph
            return
        if self.state == "waiting" and self._turns:
            self._begin()
        elif self.state == "tracing":
            self._done += 1
            if self._asked_by is None or self._done >= self._steps or self._is_large():
                self._end()

    def _begin(self) -> None:
        started = clock.perf_counter()
        self._rss = _resident_bytes()
        self._first = self._count.done + 1 + (self._count.offset or 0)
        self.state = "tracing"
        try:
            self._profiler.begin(self._described())
        except BaseException as error:  # noqa: BLE001  what is not ours is raised again
            self._spoil(error)
            return
        self._spans.is_on = True
        self._pause_s += clock.perf_counter() - started
        if not self._turns:  # it was abandoned meanwhile
            self._spans.stop()
            self._profiler.end(wait=False)
            self.state = "idle"

    def _described(self) -> dict[str, str]:
        process = self._process
        metadata = {"run": process.run, "rank": process.rank, "first_step": self._first, "steps": self._steps,
                "is_step_absolute": self._count.offset is not None}  # fmt: skip
        described = {"hookd": json.dumps(metadata)}
        if process.world_size > 1:  # under the name and in the form that torch's own profiler uses
            described["distributedInfo"] = json.dumps({"rank": process.rank, "world_size": process.world_size})
        return described

    def _is_large(self) -> bool:
        return _resident_bytes() - self._rss > GROWTH * self._most_bytes

    def _end(self) -> None:
        if not self._take():
            return
        started = clock.perf_counter()
        self._spans.stop()
        try:
            result = self._profiler.end()
        except BaseException as error:  # noqa: BLE001  what is not ours is raised again
            self._spoil(error)
            return
        self._pause_s += clock.perf_counter() - started
        if self._asked_by is None:
            return
        self.state = "saving"
        self._background.add(Spans.name, lambda: self._save(result))

    def _spoil(self, error: BaseException) -> None:
        """Fail the trace after an error; raise the error again if it belongs to the training code."""
        # A signal handler may raise here: ending a recording can take seconds.
        self._fail(error)
        self._spans.stop()
        try:
            self._profiler.end(wait=False)
        finally:
            if not isinstance(error, Failure) or is_from_signal_handler(error):
                raise error

    def _yielded(self) -> None:
        """End the recording before the training begins a profiler of its own."""
        if self.state == "waiting" and self._take():
            self._fail(profiler.in_use())
        elif self.state == "tracing" and self._take():
            self._spans.stop()
            self._profiler.end(wait=False)
            self._fail(profiler.in_use())

    def _fail(self, failure: BaseException) -> None:
        self._turns.clear()
        known = isinstance(failure, HookdError)
        text = f"torch's profiler fails in the target: {worded(failure)}"
        self._error = failure if known else ControlError(text, reason="profiler-failed")  # type: ignore[assignment]
        self.state = "failed" if self._asked_by is not None else "idle"

    # -- in a thread of its own

    def _save(self, result: Any) -> None:
        if self._asked_by is None:  # the process ends, or an agent leaves
            return
        started = clock.perf_counter()
        try:
            file = self._saved(result)
        except Failure as failure:
            self._fail(failure)
            return
        if self._asked_by is None:  # the client has gone meanwhile
            file.close()
            return
        self._pause_s += clock.perf_counter() - started  # torch writes under the interpreter's lock
        self._file, self.state = file, "done"

    def _saved(self, result: Any) -> Descriptor:
        """Write a recording to a file, unlink it, and return its descriptor; torch can only write to a path.

        Raises:
            ControlError: reason "no-room".
        """
        folder = f"{_roomy(self._most_bytes)}/hookd-trace-{posix.getpid()}-{secrets.token_hex(6)}"
        posix.mkdir(folder, 0o700)
        path = f"{folder}/trace.json"
        try:
            self._profiler.save(result, path)
            return Descriptor(moved_up(posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)))
        except FileNotFoundError as exc:
            raise ControlError(f"torch could not write the trace to {folder}", reason="no-room") from exc
        finally:
            for name in posix.listdir(folder):  # a temporary file of torch's may be left
                posix.unlink(f"{folder}/{name}")
            posix.rmdir(folder)

    def exiting(self) -> None:
        """End the recording when the process ends, where torch would crash; nothing is saved or waited for."""
        self.state, self._asked_by = "idle", None
        self._turns.clear()
        self._spans.stop()
        self._profiler.end(wait=False)

    def forget(self) -> None:
        """Stop recording in a forked child."""
        self.state = "idle"
        self._profiler.abandon()


def _roomy(size: int) -> str:
    """Return a directory in which the target may write `size` bytes, preferably on a disk.

    Raises:
        ControlError: reason "no-room".
    """
    for name in _FOLDERS:
        named = name if name.startswith("/") else environ.get(name, "")
        try:
            folder = real_path(named)
            free = posix.statvfs(folder)
        except OSError:
            continue
        is_writable = named.startswith("/") and posix.access(folder, posix.W_OK | posix.X_OK)
        if is_writable and free.f_bavail * free.f_frsize > size:
            return folder
    raise ControlError(
        f"no writable directory with {size >> 20} MiB free in the target (looked in {', '.join(_FOLDERS)})", reason="no-room",
        hint="Free some space there, or ask for less with --max-size.",
    )  # fmt: skip


def _resident_bytes() -> int:
    try:
        return int(read("/proc/self/statm").split()[1]) * posix.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):  # a container without /proc: the size is unknown
        return 0


def _clean(name: str) -> str:
    """Replace characters that would end the string that Kineto writes the name into without escaping it."""
    return "".join(c if c.isprintable() and c not in '"\\' else "?" for c in name)
