"""Run the calls that may never return, in a child process: see `waiter.py`.

Objects that a target controls are accessed here and not in hookd: descriptors of the target are copied, paths below its root are
walked. Even closing such a file may block forever (fs/fuse/file.c, `fuse_flush`). Therefore only objects that the kernel itself
serves are passed back: files of /proc, memory files, and bytes.

Only the standard library, `untrusted` and `hookd.wire.peer` can be imported here.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

from hookd.tool.linux import untrusted
from hookd.wire.peer import peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Fds = Sequence[int]

LENGTH = struct.Struct("<Q")
"""The length in bytes that precedes a request and an answer. A request is a name of CALLS and its arguments. An answer is an
errno (0 for none), the text of an `UnexpectedError`, and the result. Both are serialized by `marshal`; descriptors are sent with
the length."""
_MOST_FDS = 2
# ext2 to ext4, xfs, btrfs, tmpfs, f2fs, bcachefs, zfs: include/uapi/linux/magic.h (Linux 6.18), zfs by its own sources.
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0xCA451A4E, 0x2FC12FC1})
_OVERLAY = 0x794C7630
_PIDFD_GETFD = 438  # on every machine; Linux 5.6


def read_all(fd: int, limit: int) -> bytes:
    """Read from a descriptor to its end, `limit` bytes at most."""
    parts, size = [], 0
    while size < limit and (part := os.read(fd, min(limit - size, 1 << 16))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


class Passed(int):
    """A descriptor to send to hookd, and then to close here."""


def pread(fds: Fds, size: int, address: int) -> bytes:
    """Read memory through an open /proc/PID/mem."""
    return os.pread(fds[0], size, address)


def pwrite(fds: Fds, data: bytes, address: int, until_ns: int) -> int:
    """Write memory, but not after `until_ns` of the monotonic clock; 0 for no deadline."""
    if until_ns and time.monotonic_ns() > until_ns:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    return os.pwrite(fds[0], data, address)


def read(fds: Fds, limit: int) -> bytes:
    """Read an open file from its beginning, `limit` bytes at most."""
    os.lseek(fds[0], 0, os.SEEK_SET)
    return read_all(fds[0], limit)


def read_name(_: Fds, pid: int, name: str, limit: int) -> bytes:
    """Read /proc/PID/NAME."""
    fd = open_name(_, pid, name, os.O_RDONLY)
    try:
        return read_all(fd, limit)
    finally:
        os.close(fd)


def open_name(_: Fds, pid: int, name: str, flags: int) -> Passed:
    """Open /proc/PID/NAME."""
    return Passed(os.open(f"/proc/{pid}/{name}", flags | os.O_CLOEXEC))


def links(_: Fds, paths: Sequence[str]) -> list[str]:
    """Read symbolic links below /proc, "" for each that cannot be read."""
    return [_link(path) for path in paths]


def _link(path: str) -> str:
    try:
        return os.readlink(f"/proc/{path}")  # noqa: PTH115  thousands at a time
    except OSError:
        return ""


def open_memory_file(_: Fds, pid: int, number: int, uids: Sequence[int]) -> Passed:
    """Open a memory file, see `untrusted.open_memory_file`."""
    return Passed(untrusted.open_memory_file(pid, number, frozenset(uids)))


def read_part(_: Fds, pid: int, number: int, uid: int, offset: int, size: int) -> tuple[int, bytes]:
    """Return the size in bytes of a regular file of `uid` that a process has open, and a part of its content."""
    fd = untrusted.open_file(f"/proc/{pid}/fd/{number}", lambda status: status.st_uid == uid, follow=True)
    try:
        return os.fstat(fd).st_size, os.pread(fd, size, offset)
    finally:
        os.close(fd)


def send_through_pair(fds: Fds, pid: int, number: int, inode: int) -> int:
    """Send a socket through a Unix socket of a process, if the process created that one; return the creator's pid.

    Args:
        fds: a pidfd of the process, and the socket to send.
        pid: of the process.
        number: of its descriptor.
        inode: that the process's socket must have.

    Raises:
        OSError: the descriptor is another object, or the socket is full; the call does not wait.
    """
    process, sent = fds
    fd = _copy_of(process, number)
    try:
        outer = _socket.socket(fileno=fd)  # not fstat: a file system can report anything about its files
        try:
            if outer.family != _socket.AF_UNIX or os.fstat(fd).st_ino != inode:
                raise OSError(errno.ESTALE, "its socket is not there any more")
            # For a socket pair this is its creator; for a socket connected elsewhere it is 0 or the pid of a service.
            maker = peer_of(outer).pid
            if maker == pid:
                rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", sent))]
                outer.sendmsg([b"hookd"], rights, _socket.MSG_DONTWAIT)
            return maker
        finally:
            outer.detach()
    finally:
        os.close(fd)


def _copy_of(process: int, number: int) -> int:
    import ctypes  # noqa: PLC0415  loading it takes as long as everything else here, and most children do not need it

    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd


def connect(fds: Fds, pid: int, path: str, uid: int) -> None:
    """Connect a socket to a socket file of `uid` below the root of a process; see `untrusted.connect`."""
    directory, name = _directory_of(pid, path)
    try:
        connection = _socket.socket(fileno=fds[0])
        try:
            untrusted.connect(connection, name, dir_fd=directory, uid=uid)
        finally:
            connection.detach()
    finally:
        os.close(directory)


def remove_dead(_: Fds, pid: int, path: str, uid: int) -> bool:
    """Remove a stale socket file of `uid` below the root of a process; return whether it was removed."""
    directory, name = _directory_of(pid, path)
    probe = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK)
    try:
        untrusted.connect(probe, name, dir_fd=directory, uid=uid)
    except ConnectionRefusedError:
        os.unlink(name, dir_fd=directory)
        return True
    finally:
        probe.close()
        os.close(directory)
    return False


def open_local_directory(_: Fds, pid: int, parts: Sequence[str]) -> Passed:
    """Open a directory below the root of a process, if the kernel itself serves its file system."""
    fd = untrusted.open_directory(pid, tuple(parts))
    try:
        _require_local(fd, pid)
    except BaseException:
        os.close(fd)
        raise
    return Passed(fd)


def open_local_socket(_: Fds, pid: int, path: str, uid: int) -> Passed:
    """Return an O_PATH descriptor of a socket file of `uid`, if the kernel itself serves the file system."""
    directory, name = _directory_of(pid, path)
    try:
        with untrusted.open_socket_path(name, dir_fd=directory, uid=uid) as fd:
            _require_local(fd, pid)
            return Passed(os.dup(fd))
    finally:
        os.close(directory)


def _require_local(fd: int, pid: int) -> None:
    kind = _file_system(fd)
    # The mounter of an overlay chooses its lower file systems, and any user may mount one in a user namespace of its own.
    if kind not in _LOCAL and not (kind == _OVERLAY and _link(f"{pid}/ns/user") == _link("self/ns/user") != ""):
        raise untrusted.UnexpectedError(errno.EREMOTE, f"a file system of the kind {kind:#x} may wait for its server")


def _file_system(fd: int) -> int:
    import ctypes  # noqa: PLC0415  see `_copy_of`

    statfs = (ctypes.c_long * 32)()  # struct statfs; the type is its first field: statfs(2)
    if ctypes.CDLL(None, use_errno=True).fstatfs(fd, statfs):
        raise OSError(ctypes.get_errno(), "fstatfs")
    return statfs[0] & 0xFFFFFFFF


def _directory_of(pid: int, path: str) -> tuple[int, str]:
    directory, _, name = path.rpartition("/")
    return untrusted.open_directory(pid, tuple(part for part in directory.split("/") if part)), name


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        *(pread, pwrite, read, read_name, open_name, links, open_memory_file, read_part),
        *(send_through_pair, connect, remove_dead, open_local_directory, open_local_socket),
    )
}


def capabilities() -> int:
    """Return the bit set of effective capabilities of this process, see `man 7 capabilities`."""
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123
        return next(int(line.split()[1], 16) for line in file if line.startswith(b"CapEff:"))


def give_up(kept: int) -> None:
    """Drop all capabilities except `kept`.

    Needed because exec restores those that a root process has dropped, see capset(2).
    """
    ours = capabilities()
    if not ours & ~kept:
        return
    import ctypes  # noqa: PLC0415  see `_copy_of`

    words = [ours & kept & 0xFFFFFFFF, (ours & kept) >> 32]
    version_3, sets = (
        struct.pack("Ii", 0x20080522, 0),
        struct.pack("6I", *(part for word in words for part in (word, word, 0))),
    )
    if ctypes.CDLL(None, use_errno=True).capset(version_3, sets):
        raise OSError(ctypes.get_errno(), "capset")


def main() -> None:
    """Answer requests on descriptor 0 until its other end is closed; the first argument lists the capabilities to keep."""
    give_up(int(sys.argv[1], 16))
    os.closerange(3, 1 << 16)  # inheritable descriptors of the parent
    connection = _socket.socket(fileno=0)
    while True:
        head, ancillary, _, _ = connection.recvmsg(LENGTH.size, _socket.CMSG_SPACE(4 * _MOST_FDS))
        if not head:
            os._exit(0)
        fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data)]
        (length,) = LENGTH.unpack(head + _take(connection, LENGTH.size - len(head)))
        name, *arguments = marshal.loads(_take(connection, length))  # noqa: S302  written by hookd
        answer = _answer(name, fds, arguments)
        for fd in fds:
            os.close(fd)
        _send(connection, *answer)


def _answer(name: str, fds: Fds, arguments: Sequence[Any]) -> tuple[int, str, Any]:
    try:
        return 0, "", CALLS[name](fds, *arguments)
    except untrusted.UnexpectedError as error:
        return error.errno or errno.EINVAL, error.strerror or "", None
    except OSError as error:
        return error.errno or errno.EIO, "", None


def _send(connection: _socket.socket, number: int, text: str, result: Any) -> None:
    is_passed = isinstance(result, Passed)
    answer = marshal.dumps((number, text, None if is_passed else result))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", result))] if is_passed else []
    connection.sendmsg([LENGTH.pack(len(answer))], rights)
    connection.sendall(answer)
    if is_passed:
        os.close(result)


def _take(connection: _socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
