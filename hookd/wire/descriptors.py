"""File descriptors that hookd owns in the target, and reads and writes of files that it opens briefly.

Daemonizers and launchers close descriptors that they have not opened themselves (`os.closerange(3, 256)`), and the next file to be
opened gets the number. So a number alone is never trusted: the file behind it is checked before hookd uses or closes it, and
hookd's descriptors get numbers that few programs reach. No other module in the target closes descriptors
(tests/unit/test_imports.py).

A race remains: in the microsecond between check and close, another thread could close our descriptor and open its own.
"""

from __future__ import annotations

import _socket
import contextlib
import ctypes
import posix
from stat import S_IFMT
from typing import TYPE_CHECKING

from hookd.wire.originals import MOST_FILES, limit

if TYPE_CHECKING:
    from typing_extensions import Self

_F_DUPFD_CLOEXEC = 1030  # linux/fcntl.h
_O_PATH = 0o10000000
_MOST = 1024
"""Above this number select(2) fails, and the kernel has to grow the descriptor table of the process."""
_STREAMS = 3
_fcntl = ctypes.CDLL(None, use_errno=True)["fcntl"]  # pyfakefs replaces its module as a whole

What = tuple[int, int, int]


class Descriptor:
    """A file descriptor that hookd owns.

    Args:
        number: an open descriptor; this object becomes its owner.

    Attributes:
        number: -1 once it is closed.
    """

    __slots__ = ("_what", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._what = _what(number)

    def is_ours(self) -> bool:
        """Whether it is open and still refers to the file that we were given."""
        return self._what is not None and self._what == _what(self.number)

    def close(self) -> None:
        """Close it, unless the number belongs to another file by now; may be called twice."""
        if self.is_ours():
            posix.close(self.number)
        self.number = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Spare:
    """A reserved descriptor, released briefly so that a file can be opened when the program has used up all others.

    Args:
        number: an open descriptor; the reserved one is a duplicate of it.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._reserve: Descriptor | None = None
        self.take()

    def take(self) -> None:
        """Reserve a descriptor again, if one is free."""
        if self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = Descriptor(moved_up(fcntl(self._number, _F_DUPFD_CLOEXEC, _STREAMS)))

    def give(self) -> None:
        """Release the descriptor; may be called twice."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None


class Socket(_socket.socket):
    """A non-blocking socket that hookd owns.

    Args:
        number: an open descriptor; this object becomes its owner.
    """

    _what: What | None = None

    def __init__(self, number: int) -> None:
        super().__init__(fileno=number)
        self.setblocking(False)  # the program may have called `socket.setdefaulttimeout`
        self._what = _what(number)

    def is_ours(self) -> bool:
        """Whether it is open and still refers to the socket that we were given."""
        return self._what is not None and self._what == _what(self.fileno())

    def close(self) -> None:
        """Close it, unless the number belongs to another file by now; may be called twice."""
        if not self.is_ours():
            self.detach()
        super().close()

    __del__ = close


def moved_up(number: int) -> int:
    """Move a descriptor to a number that few programs reach, or at least above the standard streams, and return the number.

    If no such number is free, it stays.
    """
    most = min(limit(MOST_FILES) or _MOST, _MOST)
    for lowest in (most * 3 // 4, _STREAMS):
        if number < lowest:
            with contextlib.suppress(OSError):
                moved = fcntl(number, _F_DUPFD_CLOEXEC, lowest)
                posix.close(number)
                return moved
    return number


def fcntl(number: int, command: int, argument: int) -> int:
    """Query or change a descriptor by a command of the system call.

    Raises:
        OSError: as fcntl(2).
    """
    answer = int(_fcntl(number, command, argument))
    if answer < 0:
        raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))
    return answer


def real_path(path: str) -> str:
    """Return the path of a file or folder with symbolic links resolved, or `path` itself if /proc is not mounted.

    Raises:
        OSError: it does not exist.
    """
    with Descriptor(posix.open(path, _O_PATH | posix.O_CLOEXEC)) as file:
        try:
            return posix.readlink(f"/proc/self/fd/{file.number}")
        except FileNotFoundError:
            return path


def read(path: str) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError: it cannot be read.
    """
    with Descriptor(posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)) as file:
        pieces = []
        while piece := posix.read(file.number, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)


def write(path: str, data: bytes) -> None:
    """Write a file, replacing its contents if it exists.

    Raises:
        OSError: it cannot be written.
    """
    with Descriptor(posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, 0o666)) as file:
        fill(file.number, data)


def fill(number: int, data: bytes) -> None:
    """Write all of `data` to an open file.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        view = view[posix.write(number, view) :]


def _what(number: int) -> What | None:
    """Return what identifies an open file: device, inode and file type; None if it is not open."""
    try:
        status = posix.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino, S_IFMT(status.st_mode)
