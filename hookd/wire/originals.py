"""What the interpreter offers, whoever has replaced it: threads, locks, clocks, waiting. Runs in the target.

gevent, eventlet, freezegun, pyfakefs and their like put functions of their own into `threading`, `_thread`, `time`, `select`,
`socket`, `queue`, `signal` and `os`, for the program: before hookd comes, or while it is there. A thread of ours would become
a greenlet of the training's own thread (and block that one's signals), and a frozen clock would hold a deadline off for ever.
So nothing of ours that runs in a target takes threads, locks, clocks, sockets or waiting from those modules. Taken is what
nobody replaces, the functions of the C modules `_signal`, `_queue`, `_socket` and `posix`; and where `_thread` or `time` have
been replaced as well, the same functions out of a second instance of the module, which CPython makes out of its own memory.

Most names stand in classes: freezegun goes through all modules and replaces what it finds in them.
"""

from __future__ import annotations

import _imp
import _queue
import _signal  # type: ignore[import-not-found]  # the part of `signal` that is in C
import _thread
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
    """Return a module of C whose functions of these names are its own: `module`, or a new instance of it."""
    found = [getattr(module, name) for name in names]
    if all(isinstance(one, (_BUILTIN, type)) and one.__module__ == module.__name__ for one in found):
        return module
    spec: Any = BuiltinImporter.find_spec(module.__name__)
    made = _imp.create_builtin(spec)
    _imp.exec_builtin(made)
    return made


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
    """The clocks of `time`, in seconds where the name does not say ns."""

    monotonic = staticmethod(_times.monotonic)
    perf_counter = staticmethod(_times.perf_counter)
    perf_counter_ns = staticmethod(_times.perf_counter_ns)
    thread_time = staticmethod(_times.thread_time)
    sleep = staticmethod(_times.sleep)
    _gettime = staticmethod(_times.clock_gettime)

    @staticmethod
    def time() -> float:
        """Return the unix time.

        time-machine replaces functions in C, in every instance of the module; but not the clock that the kernel reads at its
        ticks alone, 4 ms apart.
        """
        return clock._gettime(_REALTIME_COARSE if "time_machine" in sys.modules else _REALTIME)


class thread:  # noqa: N801  read as `threading` is
    """Threads as the system has them."""

    get_ident = staticmethod(_threads.get_ident)
    get_native_id = staticmethod(_thread.get_native_id)
    # Taken now: the module's own attributes may be replaced later.
    _start_new = staticmethod(_threads.start_new_thread)
    _stack_size = staticmethod(_threads.stack_size)

    @staticmethod
    def is_main() -> bool:
        """Whether the caller is the thread that runs signal handlers: the process's first, in a forked child the only one."""
        return thread.get_native_id() == posix.getpid()

    @staticmethod
    def start(function: Callable[[], object]) -> None:
        """Run a function in a thread of the usual size, whatever the program has chosen for its own: that may be too little.

        Raises:
            RuntimeError: the system gives no thread.
        """
        before = thread._stack_size(0)
        try:
            thread._start_new(function, ())
        finally:
            thread._stack_size(before)

    @staticmethod
    def block_signals() -> None:
        """Have the calling thread receive no signal any more."""
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())


class Event:
    """What `threading.Event` is."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Any] = []

    def is_set(self) -> bool:
        """Whether it has been set, and not cleared since."""
        return self._is_set

    def set(self) -> None:
        """Let go who waits, and all who come."""
        self._is_set = True
        while self._waiting:
            try:
                self._waiting.pop().release()
            except IndexError:  # another thread sets it, too
                return

    def clear(self) -> None:
        """Have who comes wait again."""
        self._is_set = False

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is set, or for so long (-1: for ever); return whether it was."""
        lock = Lock()
        lock.acquire()
        self._waiting.append(lock)
        # Looked at only now, for it may be set before we stand in the list.
        return self._is_set or lock.acquire(True, timeout_s) or self._is_set


class _Polled(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("happened", ctypes.c_short))


_getrlimit = ctypes.CDLL(None)[
    "getrlimit"
]  # not every program has loaded `resource`, which may be gone from the disk by now


def limit(which: int) -> int | None:
    """Return a soft limit of this process; None without one."""
    pair = (ctypes.c_uint64 * 2)()
    failed = _getrlimit(which, pair)
    return None if failed or pair[0] == _NO_LIMIT else int(pair[0])


_poll = ctypes.CDLL(None)["poll"]  # `select` is replaced as a whole, and is no builtin module everywhere


def ready(descriptors: Iterable[int], timeout_s: float, event: int = IS_READABLE) -> list[int]:
    """Wait until something has happened at one of some descriptors, or for so long; return those at which it has.

    An end or an error has happened, too, and so has a descriptor that is closed.
    """
    asked = [_Polled(one, event, 0) for one in descriptors]
    polled = (_Polled * len(asked))(*asked)
    _poll(polled, ctypes.c_ulong(len(asked)), int(timeout_s * 1000))
    return [one.fd for one in polled if one.happened]
