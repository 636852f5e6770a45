"""Open objects that a target controls: its descriptors, the paths below its root, its sockets.

In its own namespace a target can place anything at any path: a device, a pipe, another user's file. Opening one of these has
side effects: a watchdog starts, the writer of a pipe goes on, a terminal becomes the daemon's controlling terminal. Therefore
three steps: get an O_PATH descriptor, which does not open the object; check the object; open this same object through
/proc/self/fd, wherever its path leads by then. `tests/unit/test_untrusted.py` finds opens that bypass this module.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Iterator
    from pathlib import Path


class UnexpectedError(OSError):
    """The object at a path has another type or owner than hookd expects."""


_OPENED = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def open_path(path: str | Path, *, dir_fd: int | None = None, follow: bool = False) -> Iterator[int]:
    """Yield an O_PATH descriptor of an object, without opening the object.

    Args:
        path: of the object.
        dir_fd: the directory in which a relative path starts.
        follow: whether to follow a link at the end of the path, such as those of /proc/PID/fd.

    Raises:
        OSError: the object does not exist, or, without `follow`, is a link.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(
    path: str | Path,
    accept: Callable[[os.stat_result], bool],
    flags: int = os.O_RDONLY,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file and return its descriptor.

    Args:
        path: see `open_path`.
        accept: whether a file with this status may be opened; it may raise an error of its own.
        flags: how to open the file.
        dir_fd: see `open_path`.
        follow: see `open_path`.

    Raises:
        UnexpectedError: it is not a regular file, or is not accepted.
        OSError: it does not exist, or may not be opened.
    """
    with open_path(path, dir_fd=dir_fd, follow=follow) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnexpectedError(errno.EINVAL, "it is not a regular file")
        if not accept(status):
            raise UnexpectedError(errno.EINVAL, f"it is a file of user {status.st_uid}, which is not expected there")
        return os.open(f"/proc/self/fd/{fd}", flags | _OPENED)


def open_memory_file(pid: int, number: int, uids: frozenset[int]) -> int:
    """Open a memory file that a process has open, for reading.

    Memory files are on an internal file system of the kernel, which cannot be mounted: its device number identifies them.

    Args:
        pid: of the process.
        number: of its descriptor.
        uids: users that may own the file.

    Raises:
        UnexpectedError: it is not a memory file, or belongs to another user.
        OSError: the descriptor is closed, or may not be opened.
    """
    device = _memory_device()
    return open_file(
        f"/proc/{pid}/fd/{number}",
        lambda status: status.st_dev == device and status.st_uid in uids,
        follow=True,
    )


@functools.cache
def _memory_device() -> int:
    fd = os.memfd_create("hookd-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def open_directory(pid: int, parts: tuple[str, ...]) -> int:
    """Open a directory below the root of a process without following links; return its O_PATH descriptor.

    Raises:
        OSError: it does not exist, or a part of it is a link.
    """
    fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            inner = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_PATH | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def connect(connection: _socket.socket, name: str, *, dir_fd: int, uid: int) -> None:
    """Connect to a socket file of a user, without following links to the socket of another service.

    Raises:
        UnexpectedError: the file is not a socket, or belongs to another user.
        OSError: no process accepts the connection.
    """
    with open_socket_path(name, dir_fd=dir_fd, uid=uid) as fd:
        connection.connect(f"/proc/self/fd/{fd}")


@contextlib.contextmanager
def open_socket_path(name: str, *, dir_fd: int, uid: int) -> Iterator[int]:
    """Yield an O_PATH descriptor of a socket file of a user, see `open_path`.

    Raises:
        UnexpectedError: the file is not a socket, or belongs to another user.
    """
    with open_path(name, dir_fd=dir_fd) as fd:
        status = os.fstat(fd)
        if not stat.S_ISSOCK(status.st_mode):
            raise UnexpectedError(errno.ENOTSOCK, f"{name} is not a socket")
        if status.st_uid != uid:
            raise UnexpectedError(errno.EINVAL, f"{name} belongs to user {status.st_uid}, the target to {uid}")
        yield fd
