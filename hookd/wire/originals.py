"""The interpreter's original threads, locks, clocks and waiting, even if the program has replaced them.

gevent, eventlet, freezegun, pyfakefs and similar libraries replace functions in `threading`, `_thread`, `time`, `select`,
`socket`, `queue`, `signal` and `os`, before hookd is loaded or later. A thread of hookd would then become a greenlet in the
training's own thread (and block that thread's signals), and with a frozen clock a deadline would never come. So hookd's code
in a target does not use threads, locks, clocks, sockets or waiting from those modules. It uses the functions of the C modules
`_signal`, `_queue`, `_socket` and `posix`, which these libraries leave alone. If functions of `_thread` or `time` have been
replaced too, it takes them from a second instance of the module, which CPython creates from its built-in definition.

Most names are in classes, because freezegun searches all modules and replaces the functions that it finds in them.
"""

from __future__ import annotations

import _imp
import _queue
import _signal  # type: ignore[import-not-found]  # the part of `signal` that is in C
import _thread
import contextlib
import ctypes
import posix
import sys
import time
from importlib.machinery import BuiltinImporter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BUILTIN = type(len)
_REALTIME, _REALTIME_COARSE = 0, 5  # linux/time.h
MOST_FILE_BYTES, MOST_FILES, MOST_ADDRESSES = 1, 7, 9
"""RLIMIT_FSIZE, RLIMIT_NOFILE and RLIMIT_AS of getrlimit(2) (asm-generic/resource.h)."""
_NO_LIMIT = 2**64 - 1
IS_READABLE, HAS_LEFT = 0x001, 0x2000
"""POLLIN and POLLRDHUP of poll(2)."""


def _original(module: Any, *names: str) -> Any:
    """Return `module` if these functions of the C module are original, else a new instance of it."""
    functions = [getattr(module, name) for name in names]
    if all(isinstance(function, (_BUILTIN, type)) and function.__module__ == module.__name__ for function in functions):
        return module
    spec: Any = BuiltinImporter.find_spec(module.__name__)
    original = _imp.create_builtin(spec)
    _imp.exec_builtin(original)
    return original


if TYPE_CHECKING:
    _threads, _times = _thread, time
else:
    _threads = _original(_thread, "start_new_thread", "allocate_lock", "get_ident", "stack_size", "_local")
    _times = _original(time, "monotonic", "perf_counter", "perf_counter_ns", "thread_time", "sleep", "clock_gettime")

Lock = _threads.allocate_lock
RLock = _thread.RLock
Local = _threads._local  # noqa: SLF001  `threading.local`
SimpleQueue = _queue.SimpleQueue
Empty = _queue.Empty


class clock:  # noqa: N801  read as `time` is
    """The clocks of `time`, in seconds unless the name ends in `_ns`."""

    monotonic = staticmethod(_times.monotonic)
    perf_counter = staticmethod(_times.perf_counter)
    perf_counter_ns = staticmethod(_times.perf_counter_ns)
    thread_time = staticmethod(_times.thread_time)
    sleep = staticmethod(_times.sleep)
    _gettime = staticmethod(_times.clock_gettime)

    @staticmethod
    def time() -> float:
        """Return the unix time, in seconds.

        time-machine replaces functions at the level of C, so in every instance of the module. It does not replace the coarse
        clock, which the kernel updates only at its ticks, 4 ms apart.
        """
        return clock._gettime(_REALTIME_COARSE if "time_machine" in sys.modules else _REALTIME)


class thread:  # noqa: N801  read as `threading` is
    """Threads of the operating system."""

    get_ident = staticmethod(_threads.get_ident)
    get_native_id = staticmethod(_thread.get_native_id)
    # Taken now: the module's own attributes may be replaced later.
    _start_new = staticmethod(_threads.start_new_thread)
    _stack_size = staticmethod(_threads.stack_size)

    @staticmethod
    def is_main() -> bool:
        """Whether the caller is the thread that runs signal handlers: the first of the process, or the only one of a forked child."""
        return thread.get_native_id() == posix.getpid()

    @staticmethod
    def start(function: Callable[[], object]) -> None:
        """Run a function in a new thread with the default stack size; the size that the program has chosen may be too small.

        Raises:
            RuntimeError: the system cannot start a thread.
        """
        before = thread._stack_size(0)
        try:
            thread._start_new(function, ())
        finally:
            thread._stack_size(before)

    @staticmethod
    def block_signals() -> None:
        """Block all signals in the calling thread."""
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())


class Event:
    """A `threading.Event` made of original locks."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Any] = []

    def is_set(self) -> bool:
        """Whether it has been set and not cleared since."""
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads; later waits return at once."""
        self._is_set = True
        while self._waiting:
            try:
                self._waiting.pop().release()
            except IndexError:  # another thread is in `set` too
                return

    def clear(self) -> None:
        """Make later waits block again."""
        self._is_set = False

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, at most `timeout_s` (-1: without limit), and return whether it was set."""
        lock = Lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            # Checked only now: `set` may have run before this lock was in the list.
            return self._is_set or lock.acquire(True, timeout_s) or self._is_set
        finally:
            with contextlib.suppress(ValueError):  # `set` has removed it
                self._waiting.remove(lock)


class _Polled(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


# Not from `resource`: it may not be loaded yet, and its file may be gone.
_getrlimit = ctypes.CDLL(None)["getrlimit"]


def limit(which: int) -> int | None:
    """Return a soft limit of this process; None if it is unlimited."""
    pair = (ctypes.c_uint64 * 2)()
    failed = _getrlimit(which, pair)
    return None if failed or pair[0] == _NO_LIMIT else int(pair[0])


_poll = ctypes.CDLL(None)["poll"]  # `select` is replaced as a whole, and not every Python has it as a builtin module


def ready(descriptors: Iterable[int], timeout_s: float, event: int = IS_READABLE) -> list[int]:
    """Wait at most `timeout_s` until some of the descriptors are ready, and return those.

    A descriptor is also ready at end of file, after an error, and when it is closed.
    """
    entries = [_Polled(descriptor, event, 0) for descriptor in descriptors]
    polled = (_Polled * len(entries))(*entries)
    _poll(polled, ctypes.c_ulong(len(entries)), int(timeout_s * 1000))
    return [entry.fd for entry in polled if entry.happened]
