"""Reach what a target controls in bounded time: its files, its sockets. Tool side.

A path or a descriptor of a target may lead to a file system that its own user serves, and never answers. `untrusted` says what
may be opened; here a child does it, see `waiter.py`.
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
    """Open a memory file that a process holds, see `untrusted.open_memory_file`.

    Raises:
        UnexpectedError: it is not a memory file, or belongs to another user.
        OSError: the descriptor is closed, or may not be opened.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return int(WAITERS.call(account_of(pid), "open_memory_file", pid, number, tuple(uids)))


def links(user: int, paths: Sequence[str]) -> list[str]:
    """Read symbolic links below /proc of processes for which one user answers; "" for each that cannot be read.

    Raises:
        AttachError: reason "unreadable", they were not told in time.
    """
    return list(WAITERS.call(user, "links", tuple(paths)))


def read_part(pid: int, number: int, uid: int, offset: int, size: int) -> tuple[int, bytes]:
    """Read a part of a regular file that a process holds and `uid` owns; return the size of the whole in bytes, too.

    Raises:
        UnexpectedError: it is not a regular file, or belongs to another user.
        OSError: the descriptor is closed, or may not be opened.
        AttachError: reason "unreadable", it did not answer in time.
    """
    whole, data = WAITERS.call(account_of(pid), "read_part", pid, number, uid, offset, size)
    return int(whole), bytes(data)


def send_through_pair(pid: int, number: int, inode: int, sent: socket.socket) -> int:
    """Send a socket through one that a process holds, if the process made that one itself; return the pid of who did.

    Raises:
        OSError: something else is there, or it is full.
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

    A child checks the file, and hookd itself connects: the agent shows whoever has connected as its holder. Only where the
    file system could keep hookd waiting does the child connect, too.

    Raises:
        UnexpectedError: the file is not a socket, or belongs to another user.
        OSError: nobody accepts.
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
    """Open a directory of a process's own file system, following no link, if the kernel itself keeps what is in it.

    What is done there afterwards waits for no server: of a network, or a process of the target's user.

    Raises:
        UnexpectedError: its file system may have such a server.
        OSError: it does not exist, or a part of it is a link.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return int(WAITERS.call(account_of(pid), "open_local_directory", pid, tuple(parts)))


def remove_dead(pid: int, path: str, uid: int) -> bool:
    """Remove a socket file of `uid` on which nobody listens, below the root of a process; return whether it is gone now.

    Raises:
        OSError: it is not there, or not such a file.
        AttachError: reason "unreadable", it did not answer in time.
    """
    return bool(WAITERS.call(account(uid), "remove_dead", pid, path, uid))
