"""The endpoint at which tools reach the agent: a socket file, or a pair of sockets if no file can be created.

Both accept only the target's own user and root.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import posix
import struct
from os import environ
from typing import Union

from hookd.errors import AttachError
from hookd.wire.descriptors import Descriptor, Socket, Spare, moved_up, read, real_path
from hookd.wire.peer import peer_of

_KIND = _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
_OVERFLOW_UID = 65534
_LONGEST = 100  # of the 108 bytes that a socket's address has


class SocketFile:
    """A socket file of mode 0600 in one of the usual directories.

    Its mode admits its owner and root. A root outside this user namespace (rootless containers) has no uid inside it: the
    kernel shows it as 65534, like any other unmapped user, and those are excluded by the mode.

    Attributes:
        path: path of the file, free of symbolic links, because a tool opens it from another root directory.
        spare: reserves a descriptor for a connection in case the program has used up all others.
    """

    def __init__(self, path: str) -> None:
        """Create the file and listen on it.

        Raises:
            OSError: the directory does not exist or is not writable.
        """
        self.path = path
        self.socket = _kept(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _KIND))
        self._allowed = {0, posix.geteuid()} | ({_OVERFLOW_UID} if _is_in_user_namespace() else set())
        try:
            # The file gets its mode from the descriptor (unix(7): nothing else is portable). The umask is not an option: it
            # belongs to the whole process, and so to the training.
            posix.fchmod(self.socket.fileno(), 0o600)
            self.socket.bind(path)
            self.socket.listen(16)
            self.spare = Spare(self.socket.fileno())
        except BaseException:
            self.socket.close()
            raise

    def is_ours(self) -> bool:
        """Whether the program has not closed the socket."""
        return self.socket.is_ours()

    def accept(self) -> Socket | None:
        """Return the waiting connection; None if it is refused or gone.

        Raises:
            OSError: no descriptor is free; the connection keeps waiting.
        """
        self.spare.give()
        try:
            number, _ = self.socket._accept()  # type: ignore[attr-defined]  # what `socket.socket` calls
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            return None
        finally:
            self.spare.take()
        sock = Socket(moved_up(number))
        if peer_of(sock).uid in self._allowed:
            return sock
        sock.close()
        return None

    def close(self) -> None:
        """Close the socket and keep the file, which in a forked child is the parent's."""
        self.socket.close()
        self.spare.give()

    def unlink(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            posix.unlink(self.path)


class Pair:
    """Two connected sockets in this process, for a process without a writable directory.

    A tool copies the outer one with pidfd_getfd(2) (Linux 5.6), and sends one end of its own connection through it. The kernel
    permits that to those who may ptrace: the same user and root. A pair needs no name, so it works from another network
    namespace, where an abstract socket would not be found, and a killed process leaves nothing behind.

    Attributes:
        path: `@`, the descriptor's number, `:`, and its inode, by which a tool identifies it.
        spare: as in `SocketFile`.
    """

    def __init__(self) -> None:
        self.socket, self._outer = map(_kept, _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_DGRAM | _KIND))
        number = self._outer.fileno()
        self.path = f"@{number}:{posix.fstat(number).st_ino}"
        self.spare = Spare(number)

    def is_ours(self) -> bool:
        """Whether the program has closed neither socket."""
        return self.socket.is_ours() and self._outer.is_ours()

    def accept(self) -> Socket | None:
        """Return the connection that was sent; None if the message contained no socket."""
        self.spare.give()
        try:
            _, files = receive(self.socket, 16, 1)
        except OSError:
            return None
        finally:
            self.spare.take()
        for file in files:
            try:
                return Socket(file.number)
            except OSError:
                file.close()
        return None

    def close(self) -> None:
        """Close both."""
        self.socket.close()
        self._outer.close()
        self.spare.give()

    def unlink(self) -> None:
        """Return without effect: there is no file."""


Endpoint = Union[SocketFile, Pair]  # noqa: UP007  this syntax is valid on every Python that is served


def open_endpoint() -> Endpoint:
    """Return a socket file in a writable directory, or a pair if there is none.

    `tempfile` is not used to choose the directory: it would write into each, change the training's cached choice, and fall
    back to the current directory.

    Raises:
        AttachError: reason "no-socket".
    """
    name = f"hookd-{posix.getpid()}-{posix.urandom(6).hex()}.sock"
    named = (environ.get("XDG_RUNTIME_DIR", ""), "/run", environ.get("TMPDIR", ""))
    for folder in (*named, "/tmp", "/dev/shm", "/var/tmp"):  # noqa: S108
        with contextlib.suppress(OSError):
            path = f"{real_path(folder)}/{name}"
            if folder.startswith("/") and path.isprintable() and len(path.encode()) < _LONGEST:  # tools read it in JSON
                return SocketFile(path)
    try:
        return Pair()
    except OSError as exc:
        hint = "A seccomp filter may forbid sockets, or the process may have no descriptors left."
        raise AttachError(f"process {posix.getpid()} gets no socket: {exc}", reason="no-socket", hint=hint) from exc


def receive(sock: Socket, size: int, most: int) -> tuple[bytes, list[Descriptor]]:
    """Return received data, up to `size` bytes, and the descriptors that came with it, up to `most`.

    Raises:
        OSError: recvmsg(2) failed.
    """
    data, extras, _, _ = sock.recvmsg(size, _socket.CMSG_LEN(4 * most), _socket.MSG_CMSG_CLOEXEC)
    files: list[Descriptor] = []
    for level, kind, numbers in extras:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            whole = numbers[: len(numbers) // 4 * 4]
            files += [Descriptor(moved_up(number)) for number in struct.unpack(f"{len(whole) // 4}i", whole)]
    return data, files


def _kept(sock: _socket.socket) -> Socket:
    return Socket(moved_up(sock.detach()))


def _is_in_user_namespace() -> bool:
    """Whether there are users outside this user namespace, who have no uid in it."""
    try:
        return read("/proc/self/uid_map").split() != [b"0", b"0", b"4294967295"]
    except OSError:
        return False
