"""Make calls that may never return in a child process, which can be left behind. Tool side.

Memory may be backed by a file of a network that is down, or of a file system whose server is the target's own user. Who
reads it then waits in the kernel and cannot be killed (fs/fuse/dev.c, `request_wait_answer`), and a daemon of which one
thread waits so can neither end nor give its port back. Behind such a reader, of which the target may be one itself, whoever
reads `maps`, `cmdline` or `environ` in /proc/PID waits for the lock of the address space; behind an exec that never ends,
whoever opens them. The same holds for files that a target shows: to look at one, or to close it, asks its file system.

So a child waits in our place, which holds nothing of ours. One that does not answer in time is left behind, and goes when
its system call returns. What it can be asked for is in `waiter_child.py`.
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
"""How long a call on memory may take, and any other: on a busy machine, too, it is microseconds."""
START_S = 60.0
"""How long a child may need until it answers its first call."""
STARVED_S = 10.0
"""How much longer a child is waited for that could go on and has no processor: one that waits for a file system could not."""
MOST_LEFT, MOST_LEFT_IN_ALL, MOST_OF_ONE_EACH = 4, 64, 256
"""So many children that were left behind for one user's processes, then none of these is read until one has returned; so many
for all, then only those of users who have none left; and so many even of these."""
MOST_IDLE = 2
_CMSG_CLOEXEC = 0x40000000  # MSG_CMSG_CLOEXEC of include/linux/socket.h, which socket.recv_fds would ignore (3.11)
_ROOM_FOR_A_FD = 24  # bytes of a struct cmsghdr with one descriptor, aligned
# The package is made by hand, so that `hookd` does not pull in what is not needed; and without site-packages, so that nothing
# of the environment is loaded either.
BOOTSTRAP = """
import sys, types
package = sys.modules["hookd"] = types.ModuleType("hookd")
package.__path__ = [{root!r}]
"""
_CHILD = BOOTSTRAP + "from hookd.tool.linux.waiter_child import main\nmain()\n"


def python_command(program: str) -> list[str]:
    """Return the command that runs a program, which begins with BOOTSTRAP, in a Python that loads next to nothing."""
    return [sys.executable, "-I", "-S", "-B", "-c", program.format(root=str(Path(errors.__file__).parent))]


class Waiters:
    """The children of this process: idle ones, and those that were left behind. Usable from several threads.

    The user of each call is who answers for the process, see `account_of`, asked for while the process was there.

    Args:
        clock: monotonic seconds: for how long calls are waited for together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._left: dict[int, list[int]] = {}
        self._is_here = False
        self._look = threading.local()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let the calls that this thread makes here take so long together; those after it raise at once, see `call`.

        Answers that come just before their time is over would else keep the thread waiting as often as a process likes.
        """
        outer = getattr(self._look, "until", math.inf)
        self._look.until = min(outer, self._clock() + seconds)
        try:
            yield
        finally:
            self._look.until = outer

    def pread(self, user: int, fd: int, size: int, address: int) -> bytes:
        """Do `os.pread` on a descriptor of the memory of a user's process; see `call`."""
        return bytes(self.call(user, "pread", size, address, fds=(fd,), limit_s=LIMIT_S))

    def pwrite(self, user: int, fd: int, data: bytes, address: int, until: float = math.inf) -> int:
        """Do `os.pwrite`, but not after the moment `until` of the monotonic clock; see `call`.

        Raises:
            OSError: ETIMEDOUT, the moment is over.
        """
        until_ns = 0 if until == math.inf else max(1, int(until * 1e9))
        return int(self.call(user, "pwrite", data, address, until_ns, fds=(fd,), limit_s=LIMIT_S))

    def read(self, user: int, fd: int, limit: int) -> bytes:
        """Read from the beginning to the end of a file of /proc/PID, or as far as `limit`; see `call`."""
        return bytes(self.call(user, "read", limit, fds=(fd,)))

    def call_as_ancestor(self, user: int, name: str, *arguments: Any, fds: Sequence[int] = ()) -> Any:
        """Make a call for which the process must be traceable; see `call`.

        Yama lets a user trace the processes that are below the tracer, as a child of ours is not. To who is not root no file
        system of its own user is hostile.
        """
        try:
            return self.call(user, name, *arguments, fds=fds)
        except PermissionError:
            if os.geteuid() == 0:
                raise
            return _here(name, fds, arguments)

    def make_calls_here(self) -> None:
        """Make all further calls in this process: it is one that is left behind itself, and has no time for a child."""
        self._is_here = True

    def call(self, user: int, name: str, *arguments: Any, fds: Sequence[int] = (), limit_s: float = 0.0) -> Any:
        """Have a child make a call of `waiter_child.CALLS`, and return its result; a descriptor belongs to the caller.

        Args:
            user: who answers for the process.
            name: of the call.
            arguments: of the call: what `marshal` takes.
            fds: lent to the call.
            limit_s: how long to wait; 0 for MAPS_S.

        Raises:
            OSError: as the call; `UnexpectedError` among them.
            AttachError: reason "unreadable", it has not returned in time, or too many for this user have not.
        """
        if self._is_here:
            return _here(name, fds, arguments)
        until = getattr(self._look, "until", math.inf)
        limit_s = min(limit_s or MAPS_S, until - self._clock())
        if limit_s <= 0:
            raise AttachError("the process cannot be read: its answers take too long", reason="unreadable")
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
        """Leave a child of ours behind that waits for a user's process: it is killed, and goes when its call returns."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        with self._lock:
            self._left.setdefault(user, []).append(child)

    def require_few(self, user: int) -> None:
        """Refuse to wait once more for a user's processes where too many children wait already.

        Raises:
            AttachError: reason "unreadable".
        """
        if not self._left:
            return
        with self._lock:
            self._left = {one: waiting for one, left in self._left.items() if (waiting := list(filter(_waits, left)))}
            left, all_left = len(self._left.get(user, ())), sum(map(len, self._left.values()))
        if left >= MOST_LEFT or all_left >= (MOST_LEFT_IN_ALL if left else MOST_OF_ONE_EACH):
            raise AttachError(
                f"{left if left >= MOST_LEFT else all_left} reads of memory have not returned: a file system that processes map does not answer",
                reason="unreadable",
            )

    def close(self) -> None:
        """End the children that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def forget(self) -> None:
        """Know of no children: in a forked child they are the parent's."""
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
                child.socket.close()  # somebody has ended it
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
    """One child, which makes one call at a time. It ends when the other end of its socket is closed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        import socket  # noqa: PLC0415  the injector does without, and is to begin at once

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
        """Have a call made and wait for it, in no case after `until`; return what gives its result, or raises its error.

        Raises:
            TimeoutError: it has not returned.
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
        """Have it read nothing, which shows that it runs."""
        self.socket.settimeout(START_S)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._ask(("read", 0), (null,), math.inf)
        finally:
            os.close(null)
        self._is_new = False

    def _ask(self, request: tuple[Any, ...], fds: Sequence[int], until: float) -> tuple[int, str, Any]:
        """Return the errno, the text of an `UnexpectedError`, and the result, which may be a descriptor."""
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
        """Receive the beginning of an answer, with a descriptor."""
        until, limit_s = min(until, self._clock() + STARVED_S), self.socket.gettimeout()
        while True:
            try:
                return self._part()
            except TimeoutError:
                if _is_runnable(self.pid) and self._clock() < until:
                    continue
            # It may have answered just before it was looked at.
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
                raise OSError(errno.EPIPE, "the process that reads for hookd has ended")
            data += part
        return bytes(data)

    def close(self) -> None:
        """End it and wait for it: it is in no call."""
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
"""Those of this process."""
atexit.register(WAITERS.close)
os.register_at_fork(after_in_child=WAITERS.forget)
