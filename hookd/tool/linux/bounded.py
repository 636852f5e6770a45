"""Access the files and sockets of a target in bounded time.

A path or a descriptor of a target may lead to a file system that the target's own user serves, and that never answers.
`untrusted` decides what may be opened; here a child process opens it, see `waiter.py`.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hookd.tool.linux.accounts import account, account_of
from hookd.tool.linux.untrusted import UnexpectedError
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence


def open_memory_file(pid: int, number: int, uids: frozenset[int]) -> int:
    """Open a memory file that a process has open, see `untrusted.open_memory_file`.

    Raises:
        UnexpectedError: it is not a memory file, or belongs to another user.
        OSError: the descriptor is closed, or may not be opened.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return int(WAITERS.call(account_of(pid), "open_memory_file", pid, number, tuple(uids)))


def links(user: int, paths: Sequence[str]) -> list[str]:
    """Read symbolic links below /proc of processes of one accountable user; "" for each that cannot be read.

    Raises:
        AttachError: reason "unreadable", they were not read in time.
    """
    return list(WAITERS.call(user, "links", tuple(paths)))


def read_part(pid: int, number: int, uid: int, offset: int, size: int) -> tuple[int, bytes]:
    """Return the size in bytes of a regular file of `uid` that a process has open, and a part of its content.

    Raises:
        UnexpectedError: it is not a regular file, or belongs to another user.
        OSError: the descriptor is closed, or may not be opened.
        AttachError: reason "unreadable", it did not answer in time.
    """
    total, data = WAITERS.call(account_of(pid), "read_part", pid, number, uid, offset, size)
    return int(total), bytes(data)


def send_through_pair(pid: int, number: int, inode: int, sent: socket.socket) -> int:
    """Send a socket through a Unix socket of a process, if the process created that one; return the creator's pid.

    Raises:
        OSError: the descriptor is another object, or the socket is full.
        AttachError: reason "unreadable", it did not answer in time.
    """
    pidfd = os.pidfd_open(pid)
    try:
        fds = (pidfd, sent.fileno())
        return int(WAITERS.call_as_ancestor(account_of(pid), "send_through_pair", pid, number, inode, fds=fds))
    finally:
        os.close(pidfd)


def connect(connection: socket.socket, pid: int, path: str, uid: int) -> None:
    """Connect to a socket file of `uid` below the root of a process, following no link.

    A child checks the file, and hookd itself connects, because the agent reports the process that connected as its holder.
    The child connects as well only if the file system could block hookd.

    Raises:
        UnexpectedError: the file is not a socket, or belongs to another user.
        OSError: no process accepts the connection.
        AttachError: reason "unreadable", it did not answer in time.
    """
    user = account_of(pid)
    try:
        fd = int(WAITERS.call(user, "open_local_socket", pid, path, uid))
    except UnexpectedError as error:
        if error.errno != errno.EREMOTE:
            raise
        WAITERS.call(user, "connect", pid, path, uid, fds=(connection.fileno(),))
        return
    try:
        connection.connect(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def open_local_directory(pid: int, parts: Sequence[str]) -> int:
    """Open a directory below the root of a process, following no link, if the kernel itself serves it.

    Later operations on it do not depend on a server, be it on the network or a process of the target's user.

    Raises:
        UnexpectedError: its file system may depend on a server.
        OSError: it does not exist, or a part of it is a link.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return int(WAITERS.call(account_of(pid), "open_local_directory", pid, tuple(parts)))


def remove_dead(pid: int, path: str, uid: int) -> bool:
    """Remove a stale socket file of `uid` below the root of a process; return whether it was removed.

    Raises:
        OSError: it does not exist, or is not such a file.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return bool(WAITERS.call(account(uid), "remove_dead", pid, path, uid))
