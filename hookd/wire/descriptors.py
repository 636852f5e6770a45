"""The descriptors that hookd holds in somebody else's process, and files of a moment. Runs in the target.

Daemonizers and launchers close what they have not opened themselves (`os.closerange(3, 256)`), and the next file that is opened
gets the number. So a number alone is never trusted: what stands behind it is looked at before ours is used or closed; and ours get
numbers that few programs reach. No other module of the target's side closes a descriptor (tests/unit/test_imports.py).

Between the look and the close another thread could still do both, close ours and open its own: a microsecond.
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
"""Above it select(2) fails, and the kernel's table of the process grows."""
_STREAMS = 3
_fcntl = ctypes.CDLL(None, use_errno=True)["fcntl"]  # pyfakefs replaces its module as a whole

What = tuple[int, int, int]


class Descriptor:
    """One open file of ours.

    Args:
        number: of an open descriptor, which is taken over.

    Attributes:
        number: -1 once it is closed.
    """

    __slots__ = ("_what", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._what = _what(number)

    def is_ours(self) -> bool:
        """Whether it is open, and what it was when we got it."""
        return self._what is not None and self._what == _what(self.number)

    def close(self) -> None:
        """Close it, unless it is somebody else's by now; may be called twice."""
        if self.is_ours():
            posix.close(self.number)
        self.number = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Spare:
    """A descriptor that is given back for a moment, so that one can be opened where the program has used up all others.

    Args:
        number: of an open descriptor, of which it is a copy.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: Descriptor | None = None
        self.take()

    def take(self) -> None:
        """Have it again, if there is one."""
        if self._held is None:
            with contextlib.suppress(OSError):
                self._held = Descriptor(moved_up(fcntl(self._number, _F_DUPFD_CLOEXEC, _STREAMS)))

    def give(self) -> None:
        """Let go of it; may be called twice."""
        if self._held is not None:
            self._held.close()
            self._held = None


class Socket(_socket.socket):
    """A socket of ours.

    Args:
        number: of an open descriptor, which is taken over.
    """

    _what: What | None = None

    def __init__(self, number: int) -> None:
        super().__init__(fileno=number)
        self.setblocking(False)  # not what the program has chosen with `socket.setdefaulttimeout`
        self._what = _what(number)

    def is_ours(self) -> bool:
        """Whether it is open, and what it was when we got it."""
        return self._what is not None and self._what == _what(self.fileno())

    def close(self) -> None:
        """Close it, unless its number is somebody else's by now; may be called twice."""
        if not self.is_ours():
            self.detach()
        super().close()

    __del__ = close


def moved_up(number: int) -> int:
    """Move a descriptor to a number that few programs reach; where none is free it stays, but not among the standard streams."""
    most = min(limit(MOST_FILES) or _MOST, _MOST)
    for lowest in (most * 3 // 4, _STREAMS):
        if number < lowest:
            with contextlib.suppress(OSError):
                moved = fcntl(number, _F_DUPFD_CLOEXEC, lowest)
                posix.close(number)
                return moved
    return number


def fcntl(number: int, command: int, argument: int) -> int:
    """Ask the kernel about a descriptor, or have it changed, as its manual (2) says.

    Raises:
        OSError: as fcntl(2).
    """
    answer = int(_fcntl(number, command, argument))
    if answer < 0:
        raise OSError(ctypes.get_errno(), posix.strerror(ctypes.get_errno()))
    return answer


def real_path(path: str) -> str:
    """Return the path of a file or folder without symbolic links; without /proc, as it is.

    Raises:
        OSError: there is none.
    """
    with Descriptor(posix.open(path, _O_PATH | posix.O_CLOEXEC)) as file:
        try:
            return posix.readlink(f"/proc/self/fd/{file.number}")
        except FileNotFoundError:
            return path


def read(path: str) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: it cannot be read.
    """
    with Descriptor(posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)) as file:
        pieces = []
        while piece := posix.read(file.number, 1 << 16):
            pieces.append(piece)
        return b"".join(pieces)


def write(path: str, data: bytes) -> None:
    """Make a file that holds this, in the place of what is there.

    Raises:
        OSError: it cannot be written.
    """
    with Descriptor(posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, 0o666)) as file:
        fill(file.number, data)


def fill(number: int, data: bytes) -> None:
    """Write all of this into an open file.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        view = view[posix.write(number, view) :]


def _what(number: int) -> What | None:
    """Tell one open file from another: device, inode, kind; None where there is none."""
    try:
        status = posix.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino, S_IFMT(status.st_mode)
