"""Begins and ends torch's profiler without harm to a training that uses it itself.

A process has one profiler (Kineto's), and it does not guard against misuse: preparing a second one, or ending one that has
been ended already, causes a segmentation fault (torch 2.13). So hookd's recording begins only if there is none, and is ended
before the training begins its own.

Only the configuration of `torch.autograd.profiler.profile` is used, because it differs between versions of torch. Its other
work (lists of Python objects, a device sync of its own) is not wanted here.
Source: torch/autograd/profiler.py `profile`, torch/csrc/autograd/profiler_kineto.cpp, 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import posix
import struct
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as _torch

from hookd.errors import ControlError
from hookd.target.entry.patch import Replaced
from hookd.target.plugins.faults import Failure, is_from_signal_handler
from hookd.wire.originals import thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SILENT = 1000
_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"
"""Kineto's log level, an int in its library; at the default level Kineto writes to the standard error stream."""
_LEVEL_BYTES = 4
_GUARDED = ("_prepare_profiler", "_enable_profiler")
"""The functions in `torch.autograd.profiler` that every Python profiler of torch calls before it begins."""
_cuda_is_initialized: Any = torch.cuda.is_initialized
_profile: Any = _torch.profile
_IN_USE = ("WARMUP", "RECORD", "RECORD_AND_SAVE")
_EXTRAS: tuple[dict[str, bool], ...] = (
    {"profile_all_threads": True, "trace_only": True},
    {"profile_all_threads": True},
)
"""Settings of newer versions of torch: record the events of all threads, and create no Python objects for them."""


class Profiler:
    """One recording, from `guard` to `release`.

    Attributes:
        covers_all_threads: whether it records all threads; else only those that take part in the work of the thread that
            began it, such as the backward pass's.
    """

    def __init__(self, yielded: Callable[[], None]) -> None:
        """Create the object; `yielded` is called in the training's thread before the training begins its own profiler."""
        self.covers_all_threads = False
        self._yielded = yielded
        self._guards: list[Replaced] = []
        self._under_way: list[int] = []  # the thread that began it; the caller that removes it ends it
        self._level: Any = None
        self._has_run = False

    @property
    def is_on(self) -> bool:
        """Whether a recording is in progress."""
        return bool(self._under_way)

    def guard(self) -> None:
        """Begin to watch for a profiler of the training.

        Raises:
            ControlError: reason "profiler": the training has one already.
        """
        self._level = self._level or _level()
        self._guards = [Replaced(_torch, name, self._watched) for name in _GUARDED if hasattr(_torch, name)]
        is_used = True
        try:
            is_used = is_running() or _is_prepared()
        finally:
            if is_used:
                self.release()
        if is_used:
            raise in_use()

    def release(self) -> list[str]:
        """Stop watching; return descriptions of what could not be undone."""
        guards, self._guards = self._guards, []
        left = [f"torch.autograd.profiler.{guard.name}" for guard in guards if not guard.restore()]
        residue = [f"{name}: another tool has patched it on top of hookd, so it was not restored" for name in left]
        return [*residue, "torch's profiler is still on in a thread that took no step"] if self.is_on else residue

    def _watched(self, original: Any) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._guards:
                try:
                    self._yielded()
                except Failure as failure:
                    if is_from_signal_handler(failure):
                        raise
            return original(*args, **kwargs)

        return watched

    def begin(self, metadata: dict[str, str]) -> None:
        """Begin to record, in the training thread, a trace with this metadata: JSON by name.

        Raises:
            ControlError: reason "profiler": the training has begun one since `guard`.
            RuntimeError: torch refuses.
        """
        if is_running():
            raise in_use()
        plan, self.covers_all_threads = _plan()
        config, activities = plan.config(), plan.kineto_activities
        self._has_run = True
        try:
            with _silently(self._level):
                torch._C._autograd._prepare_profiler(config, activities)
            _notify_profilers("_run_on_profiler_start")
            with _silently(self._level):
                self._enable(config, activities)
        except BaseException as error:
            if not self.is_on and isinstance(error, RuntimeError):  # torch has refused
                _notify_profilers("_run_on_profiler_stop")
            elif not self.is_on:
                self._unprepare(config, activities)
            raise
        for name, text in metadata.items():
            torch._C._autograd._add_metadata_json(name, text)

    def _unprepare(self, config: Any, activities: Any) -> None:
        """End a recording that was only prepared: after one, torch 2.6 refuses any other, also the training's."""
        with contextlib.suppress(RuntimeError), _silently(self._level):
            self._enable(config, activities)
            self._disable()

    def _enable(self, config: Any, activities: Any) -> None:
        begun = [thread.get_ident()]
        try:
            self._under_way = begun  # no other call between this and torch's: see `_disable`
            torch._C._autograd._enable_profiler(config, activities)
        except Failure as failure:
            if not is_from_signal_handler(failure):  # a handler raises only after enabling
                self._under_way = []
            raise

    def is_own_thread(self) -> bool:
        """Whether the calling thread began the recording in progress."""
        return self._under_way == [thread.get_ident()]

    def can_end(self) -> bool:
        """Whether the calling thread can end the recording: unless it covers all threads, only the one that began it can."""
        return self.covers_all_threads or self.is_own_thread()

    def end_in_main_thread(self) -> None:
        """End the recording in the main thread, if that began it, as soon as the interpreter makes its pending calls.

        That is between two instructions of Python, so not while the thread is in native code.
        """
        call = _Once(self._end_own)
        ctypes.pythonapi["Py_IncRef"](ctypes.py_object(call))  # the interpreter gets its address only
        ctypes.pythonapi["Py_AddPendingCall"](ctypes.pythonapi["PyObject_IsTrue"], ctypes.c_void_p(id(call)))

    def _end_own(self) -> None:
        try:
            if self.is_own_thread():
                self.end(wait=False)
        except Failure as failure:
            if is_from_signal_handler(failure):
                raise

    def end(self, *, wait: bool = True) -> Any:
        """End the recording and return it; None if it was ended, or this thread cannot. With `wait`, wait for the devices first."""
        if not self.is_on or not self.can_end():
            return None
        try:
            if wait and _cuda_is_initialized():
                torch.cuda.synchronize()
        finally:  # even if the device has failed or a signal handler raises
            with _silently(self._level):
                result = self._disable()
        return result

    def _disable(self) -> Any:
        # Only one of several threads may pass, else torch crashes. There is no call between the `del` and torch's function:
        # CPython runs signal handlers after calls (3.11+), and their exception would leave a recording that nothing ends.
        try:
            del self._under_way[0]
        except IndexError:
            return None
        try:
            return torch._C._autograd._disable_profiler()
        finally:
            _notify_profilers("_run_on_profiler_stop")

    def save(self, result: Any, path: str) -> None:
        """Write a recording as JSON in Chrome's format; Kineto reports no failure, so the caller must check the file."""
        with _silently(self._level):
            result.save(path)

    def abandon(self) -> None:
        """Stop recording in a forked child, in its only thread."""
        self._guards = []
        if self._has_run:
            _skip_destructors()
        if self.is_on:
            self._under_way = []
            torch._C._autograd._enable_record_function(False)
            _torch._is_profiler_enabled = False


class _Once:
    """An object whose truth is asked for once: that makes a call, and leaves nothing of it behind."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]

    def __bool__(self) -> bool:
        self._calls.pop()()
        return False


def in_use() -> ControlError:
    """Return the error for a training that uses torch's profiler itself."""
    return ControlError(
        "a profiler runs in the target already, and torch has one for a process", reason="profiler",
        hint="It is the training's own: let it end, or use what it writes.",
    )  # fmt: skip


def is_running() -> bool:
    """Whether a profiler of torch is recording in this process, according to torch."""
    return bool(getattr(_torch, "_is_profiler_enabled", False)) or bool(torch._C._autograd._profiler_enabled())


def _is_prepared() -> bool:
    """Whether a `torch.profiler.profile` of the training is warming up.

    Torch has no function for that, so this searches for the object among all objects, which takes 70 ms in a process with a
    million of them. It searches only if the training has created one: torch/profiler/profiler.py `profile.__init__` begins to
    count its steps (2.0+).
    """
    kind = getattr(getattr(torch, "profiler", None), "profile", None)
    steps = getattr(getattr(_torch, "KinetoStepTracker", None), "_step_dict", None)
    if kind is None or steps == {}:
        return False
    profilers = [owner for owner in gc.get_referrers(*_family(kind)) if isinstance(owner, kind)]
    return any(getattr(getattr(owner, "current_action", None), "name", "") in _IN_USE for owner in profilers)


def _family(kind: Any) -> list[Any]:
    children: list[Any] = kind.__subclasses__()
    return [kind, *(cls for child in children for cls in _family(child))]


def _plan() -> tuple[Any, bool]:
    """Return torch's object for a recording of the CPU, and of CUDA if in use, and whether it covers all threads."""
    kind: Any = getattr(getattr(torch._C, "_profiler", None), "_ExperimentalConfig", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for extra in _EXTRAS if kind is not None else ():
            with contextlib.suppress(TypeError):
                return _of_devices(experimental_config=kind(**extra)), True
        return _of_devices(), False


def _of_devices(**options: Any) -> Any:
    if not _cuda_is_initialized():
        return _profile(use_kineto=True, **options)
    plan = _profile(use_kineto=True, use_device="cuda", **options)
    is_on = torch.autograd.ProfilerActivity.CUDA in plan.kineto_activities  # type: ignore[attr-defined]
    return plan if is_on else _profile(use_kineto=True, use_cuda=True, **options)  # before torch 2.4


def _notify_profilers(name: str) -> None:
    """Call a callback of torch's Python side, as torch's own profilers do (2.1+)."""
    function = getattr(_torch, name, None)
    if function is not None:
        function()


@contextlib.contextmanager
def _silently(level: Any) -> Iterator[None]:
    """Keep Kineto from writing to the training's standard error stream; a level set meanwhile is kept."""
    if level is None:
        yield
        return
    before, level.value = level.value, _SILENT
    try:
        yield
    finally:
        if level.value == _SILENT:
            level.value = before


def _level() -> Any:
    """Return Kineto's log level as a ctypes object; None if there is no symbol of this name and size."""
    try:
        path = f"{torch.__file__.rpartition('/')[0]}/lib/libtorch_cpu.so"
        level = ctypes.c_int.in_dll(ctypes.CDLL(path, mode=posix.RTLD_NOLOAD), _LEVEL)
        return level if _size(ctypes.addressof(level)) == _LEVEL_BYTES else None
    except Failure:  # another build of torch, or another libc: Kineto may print then
        return None


def _size(address: int) -> int:
    """Return the size in bytes of the symbol at an address, from the dynamic linker; a name alone says nothing of the type.

    Only glibc provides it: dlfcn.h `dladdr1` with RTLD_DL_SYMENT (1), elf.h `Elf64_Sym`. Returns 0 if it is unknown.
    """
    info, entry = (ctypes.c_void_p * 4)(), ctypes.c_void_p()
    if not ctypes.CDLL(None).dladdr1(ctypes.c_void_p(address), info, ctypes.byref(entry), 1) or info[3] != address:
        return 0
    fields = struct.unpack("=IBBHQQ", ctypes.string_at(entry.value or 0, 24)) if entry.value else (0,)
    return int(fields[-1])


def _skip_destructors() -> None:
    """Make a forked child end without C++ destructors: Kineto's waits for ever for a thread that does not exist in the child.

    The destructor is `libkineto::ConfigLoader::~ConfigLoader` in libtorch_cpu.so, 2.13; it hangs no matter which code used the
    profiler before the fork. A process that ends by `os._exit`, as all children of `multiprocessing` do, skips it anyway.
    libc's `on_exit` passes the exit status on, and the function registered last runs first.
    """
    with contextlib.suppress(*Failure):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)
