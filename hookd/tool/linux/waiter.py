"""Make calls that may never return in a child process, which can be abandoned.

Memory may be backed by a file on a network that is down, or on a file system that the target's own user serves. A process that
reads such memory blocks in the kernel and cannot be killed (fs/fuse/dev.c, `request_wait_answer`). A daemon with one such thread
can neither exit nor release its port. While such a read is in progress, perhaps by the target itself, any reader of `maps`,
`cmdline` or `environ` in /proc/PID waits for the lock of the address space; while an exec does not end, even opening them waits.
The same holds for files that a target exposes: stat and close are requests to their file system.

Therefore a child, which holds none of our resources, makes the call. A child that does not answer in time is abandoned, and ends
when its system call returns. `waiter_child.py` defines the calls.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import marshal
import math
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd import errors
from hookd.errors import AttachError
from hookd.tool.linux import waiter_child
from hookd.tool.linux.untrusted import UnexpectedError
from hookd.tool.linux.waiter_child import LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LIMIT_S, MAPS_S = 5.0, 1.0
"""Timeouts of a call on memory, and of any other call. Normally a call takes microseconds, even on a busy machine."""
START_S = 60.0
"""Timeout of the first call of a child."""
STARVED_S = 10.0
"""Extra time for a child that is runnable and gets no processor: a child that waits for a file system is not runnable."""
MOST_LEFT, MOST_LEFT_IN_ALL, MOST_OF_ONE_EACH = 4, 64, 256
"""Limits on abandoned children. MOST_LEFT for the processes of one user: none of them is read until a child has returned.
MOST_LEFT_IN_ALL for all users: then only users without an abandoned child are served, up to MOST_OF_ONE_EACH in all."""
MOST_IDLE = 2
_CMSG_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC of include/linux/socket.h, which socket.recv_fds ignores (3.11)
_ROOM_FOR_A_FD = 24  # bytes of a struct cmsghdr with one descriptor, aligned
# Creates the package by hand, so that importing `hookd` does not load unneeded modules. The child runs without site-packages, so
# that nothing of the environment is loaded either.
BOOTSTRAP = """
import sys, types
package = sys.modules["hookd"] = types.ModuleType("hookd")
package.__path__ = [{root!r}]
"""
_CHILD = BOOTSTRAP + "from hookd.tool.linux.waiter_child import main\nmain()\n"


def python_command(program: str) -> list[str]:
    """Return the command that runs a program, which begins with BOOTSTRAP, in a minimal Python."""
    return [sys.executable, "-I", "-S", "-B", "-c", program.format(root=str(Path(errors.__file__).parent))]


class Waiters:
    """The children of this process: idle ones and abandoned ones. Thread-safe.

    The `user` of each call is the user accountable for the process, see `account_of`, determined while the process existed.

    Args:
        clock: monotonic seconds, for the total time of several calls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._left: dict[int, list[int]] = {}
        self._is_here = False
        self._deadline = threading.local()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the total time of this thread's calls in this context.

        Calls after that raise at once, see `call`. Otherwise a process whose answers all come just before their timeout could
        delay the thread any number of times.
        """
        outer = getattr(self._deadline, "until", math.inf)
        self._deadline.until = min(outer, self._clock() + seconds)
        try:
            yield
        finally:
            self._deadline.until = outer

    def pread(self, user: int, fd: int, size: int, address: int) -> bytes:
        """Run `os.pread` on a descriptor of the memory of a user's process; see `call`."""
        return bytes(self.call(user, "pread", size, address, fds=(fd,), limit_s=LIMIT_S))

    def pwrite(self, user: int, fd: int, data: bytes, address: int, until: float = math.inf) -> int:
        """Run `os.pwrite`, but not after `until`, in seconds of the monotonic clock; see `call`.

        Raises:
            OSError: ETIMEDOUT, that time has passed.
        """
        until_ns = 0 if until == math.inf else max(1, int(until * 1e9))
        return int(self.call(user, "pwrite", data, address, until_ns, fds=(fd,), limit_s=LIMIT_S))

    def read(self, user: int, fd: int, limit: int) -> bytes:
        """Read an open file of /proc/PID from its beginning, `limit` bytes at most; see `call`."""
        return bytes(self.call(user, "read", limit, fds=(fd,)))

    def call_as_ancestor(self, user: int, name: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        """Make a call that needs the right to trace the process; see `call`.

        If the child is denied and we are not root, the call is made in this process. Yama lets a user trace only descendants, and
        the target may be a descendant of ours, but never of the child. Without root the target is our own user's, whose file
        systems are not hostile to us.
        """
        try:
            return self.call(user, name, *arguments, fds=fds)
        except PermissionError:
            if os.geteuid() == 0:
                raise
            return _here(name, fds, arguments)

    def make_calls_here(self) -> None:
        """Make all further calls in this process.

        For the injector, which can be abandoned itself and must be quick.
        """
        self._is_here = True

    def call(self, user: int, name: str, *arguments: Any, fds: Sequence[int] = (), limit_s: float = 0.0) -> Any:
        """Make a call of `waiter_child.CALLS` in a child, and return its result.

        The caller owns a returned descriptor.

        Args:
            user: accountable for the process.
            name: of the call.
            arguments: of the call, of types that `marshal` supports.
            fds: descriptors for the call; the caller keeps them.
            limit_s: timeout; 0 for MAPS_S.

        Raises:
            OSError: as the call, including `UnexpectedError`.
            AttachError: reason "unreadable": the call has not returned in time, or too many calls have not.
        """
        if self._is_here:
            return _here(name, fds, arguments)
        until = getattr(self._deadline, "until", math.inf)
        limit_s = min(limit_s or MAPS_S, until - self._clock())
        if limit_s <= 0:
            raise AttachError("the process cannot be read: its reads took too long in total", reason="unreadable")
        self.require_few(user)
        child = self._taken()
        try:
            answer = child.call((name, *arguments), fds, limit_s, until)
        except BaseException as error:
            self.leave(user, child.pid)
            child.socket.close()
            if isinstance(error, TimeoutError):
                text = f"its memory or files did not answer in {limit_s:g} s: a file system that it uses may hang"
                raise AttachError(f"the process cannot be read: {text}", reason="unreadable") from None
            raise
        self._give_back(child)
        return answer()

    def leave(self, user: int, child: int) -> None:
        """Abandon a child that waits for a user's process: it is killed, and ends when its system call returns."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        with self._lock:
            self._left.setdefault(user, []).append(child)

    def require_few(self, user: int) -> None:
        """Check that not too many abandoned children wait for a user's processes, or for all.

        Raises:
            AttachError: reason "unreadable".
        """
        if not self._left:
            return
        with self._lock:
            self._left = {key: waiting for key, left in self._left.items() if (waiting := list(filter(_waits, left)))}
            left, all_left = len(self._left.get(user, ())), sum(map(len, self._left.values()))
        if left >= MOST_LEFT or all_left >= (MOST_LEFT_IN_ALL if left else MOST_OF_ONE_EACH):
            raise AttachError(
                f"{left if left >= MOST_LEFT else all_left} reads of memory have not returned: a file system with mapped files does not respond",
                reason="unreadable",
                hint="Look for a network file system that hangs, then try again.",
            )

    def close(self) -> None:
        """End the idle children."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def forget(self) -> None:
        """Drop all children without ending them: after a fork they belong to the parent."""
        self._lock = threading.Lock()
        for child in self._idle:
            child.socket.close()
        self._idle, self._left = [], {}

    def _taken(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if _waits(child.pid):
                    return child
                child.socket.close()  # the child was ended from outside
        return _Child(self._clock)

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE:
                self._idle.append(child)
                return
        child.close()


def _here(name: str, fds: Sequence[int], arguments: Sequence[Any]) -> Any:
    result = waiter_child.CALLS[name](fds, *arguments)
    return int(result) if isinstance(result, waiter_child.Passed) else result


class _Child:
    """A child that makes one call at a time.

    It ends when our end of its socket is closed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        import socket  # noqa: PLC0415  the injector does not need it, and must start quickly

        self.socket, theirs = socket.socketpair()
        self._send_fds, self._clock = socket.send_fds, clock
        self._is_new = True
        null = (
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
        )
        with theirs:
            actions = ((os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), *null)
            try:
                command = [*python_command(_CHILD), f"{waiter_child.capabilities():x}"]
                self.pid = os.posix_spawn(sys.executable, command, {}, file_actions=actions, setpgroup=0)
            except BaseException:
                self.socket.close()
                raise

    def call(self, request: tuple[Any, ...], fds: Sequence[int], limit_s: float, until: float) -> Callable[[], Any]:
        """Make a call and wait for it, never beyond `until`.

        Returns:
            A function that returns the call's result or raises its error.

        Raises:
            TimeoutError: the call has not returned.
            OSError: the child has ended.
        """
        if self._is_new:
            self._begin()
        self.socket.settimeout(limit_s)
        number, text, result = self._ask(request, fds, until)

        def answer() -> Any:
            if text:
                raise UnexpectedError(number, text)
            if number:
                raise OSError(number, os.strerror(number))
            return result

        return answer

    def _begin(self) -> None:
        """Wait for the child to start: make it read an empty file."""
        self.socket.settimeout(START_S)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._ask(("read", 0), (null,), math.inf)
        finally:
            os.close(null)
        self._is_new = False

    def _ask(self, request: tuple[Any, ...], fds: Sequence[int], until: float) -> tuple[int, str, Any]:
        """Return the errno, the text of an `UnexpectedError`, and the result or a descriptor."""
        data = marshal.dumps(request)
        self._send_fds(self.socket, [LENGTH.pack(len(data))], fds)
        self.socket.sendall(data)
        head, ancillary, _, _ = self._first(until)
        passed = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        try:
            (length,) = LENGTH.unpack(head + self._take(LENGTH.size - len(head)))
            number, text, result = marshal.loads(self._take(length))  # noqa: S302  written by a child of ours
        except BaseException:
            for fd in passed:
                os.close(fd)
            raise
        return number, text, passed[0] if passed else result

    def _first(self, until: float) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        """Receive the beginning of an answer, with its descriptor if any."""
        until, limit_s = min(until, self._clock() + STARVED_S), self.socket.gettimeout()
        while True:
            try:
                return self._part()
            except TimeoutError:
                if _is_runnable(self.pid) and self._clock() < until:
                    continue
            # The answer may have come just before the state was read.
            self.socket.settimeout(0)
            try:
                return self._part()
            except BlockingIOError:
                raise TimeoutError from None
            finally:
                self.socket.settimeout(limit_s)

    def _part(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        return self.socket.recvmsg(LENGTH.size, _ROOM_FOR_A_FD, _CMSG_CLOEXEC)

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise OSError(errno.EPIPE, "hookd's reader process has ended")
            data += part
        return bytes(data)

    def close(self) -> None:
        """End the child, which must not be in a call, and wait for it."""
        self.socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _is_runnable(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        return b"\nState:\tR" in file.read(1 << 12)
    return False


def _waits(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


WAITERS = Waiters()
"""The children of this process."""
atexit.register(WAITERS.close)
os.register_at_fork(after_in_child=WAITERS.forget)
