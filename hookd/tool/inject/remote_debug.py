"""Run a script in another process without stopping it, by CPython's remote debugging (PEP 768, 3.14 and newer).

We write the fields ourselves instead of calling `sys.remote_exec`, so that the tool may run on any version of Python. Of
`eval_breaker` we write only the low byte: CPython's client rewrites all eight, and loses a bit that is set meanwhile.

A table gives the addresses of the fields, see `debug_table.py`.

Source: Python/remote_debugging.c and Python/ceval_gil.c of CPython 3.14 and 3.15.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.inject import debug_table, foundation
from hookd.tool.linux.bounded import open_local_directory
from hookd.tool.linux.untrusted import open_file

if TYPE_CHECKING:
    from hookd.tool.inject.interpreter import Interpreter
    from hookd.tool.linux.memory import Opened
    from hookd.tool.linux.proc import Status

_NAME = re.compile(r"hookd-[0-9a-f]{16}\.(?:box|py|try)")
_YOUNG_S = 60.0
_PLEASE_STOP = 1 << 5
_LOOK_AGAIN = 1 << 1 | 1 << 2 | 1 << 3
"""Bits of `eval_breaker`: a signal, a pending call, an exception set by another thread. Setting one makes CPython check for it."""


@dataclass(frozen=True)
class RemoteDebug:
    """The remote debugging of one interpreter's main thread.

    Attributes:
        is_enabled: whether the process was started with remote debugging allowed.
    """

    memory: Opened
    is_enabled: bool
    _breaker: int
    _pending: int
    _path: int
    _path_size: int

    def run_script(self, path: str) -> None:
        """Request the main thread to run the script `path`, a path in the target, at its next safe point.

        Raises:
            AttachError: reason "memory", the fields are not in private writable memory.
            OSError: the memory cannot be written, or the path is too long.
        """
        data = path.encode() + b"\0"
        if len(data) > self._path_size:
            raise OSError(36, f"the path of the script is longer than {self._path_size} bytes")
        for address, size in ((self._path, len(data)), (self._pending, 4), (self._breaker, 1)):
            self.memory.require_private(address, size, may_be_file=True)
        self.memory.write(self._path, data)
        self.memory.write(self._pending, struct.pack("<i", 1))
        low = self.memory.read(self._breaker, 1)[0]
        # A bit that is set between the read and the write would be lost: a signal was not handled until the next one came. So
        # these three are always set. CPython sets the other bits again when it needs them.
        self.memory.write(self._breaker, bytes([low | _PLEASE_STOP | _LOOK_AGAIN]))

    def cancel(self) -> None:
        """Withdraw a script that has not run yet."""
        self.memory.write(self._pending, struct.pack("<i", 0))


def find(memory: Opened, python: Interpreter) -> RemoteDebug | None:
    """Return the remote debugging of a process; None if a check of `foundation` fails.

    Raises:
        OSError: the memory cannot be read.
    """
    table = debug_table.read(memory, python)
    if table is None or not all(check.holds for check in foundation.checks(memory, python)):
        return None
    at = table.at
    interpreter, thread = debug_table.main_thread(memory, table)
    enabled = struct.unpack("<i", memory.read(interpreter + at["debugger_support.remote_debugging_enabled"], 4))[0]
    support = thread + at["debugger_support.remote_debugger_support"]
    return RemoteDebug(
        memory,
        enabled == 1,
        thread + at["debugger_support.eval_breaker"],
        support + at["debugger_support.debugger_pending_call"],
        support + at["debugger_support.debugger_script_path"],
        at["debugger_support.debugger_script_path_size"],
    )


class ScriptFolder:
    """A directory in the target's file system for temporary files that both sides use.

    The target controls its paths. Therefore each component is opened below the target's root without following links, and files
    are always created new, so that a planted file or link cannot mislead a tool that runs as root.

    Args:
        status: of the target.

    Raises:
        OSError: the target has no directory that both sides can use.
    """

    def __init__(self, status: Status) -> None:
        remove_stale(status)
        self._status = status
        self._name = f"hookd-{secrets.token_hex(8)}"
        self._made: list[str] = []
        self._files: list[int] = []
        for parts in _folders(status):
            with contextlib.suppress(OSError, HookdError):
                self._fd = open_local_directory(status.pid, parts)
                self._path = "/" + "/".join(parts)
                if self._is_usable():
                    return
                os.close(self._fd)
        raise OSError(30, f"process {status.pid} has no directory in which hookd can put a file")

    def path(self, suffix: str) -> str:
        """Return the path of a file as the target sees it."""
        return f"{self._path}/{self._name}{suffix}"

    def create(self, suffix: str) -> int:
        """Create a file that only our user can open; return its descriptor, which the caller closes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._name + suffix, flags, 0o600, dir_fd=self._fd)
        fcntl.flock(fd, fcntl.LOCK_EX)  # shows `remove_stale` that this tool is alive
        self._made.append(self._name + suffix)
        self._files.append(os.dup(fd))
        return fd

    def hand_over(self) -> None:
        """Make the target's user the owner of the files."""
        for fd in self._files:
            if os.geteuid() == 0:
                os.fchown(fd, self._status.uid, self._status.gid)
            os.close(fd)
        self._files.clear()

    def remove(self) -> None:
        """Remove the files, unless the target has done so. Call this only once."""
        for name in self._made:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
        os.close(self._fd)

    def _is_usable(self) -> bool:
        """Whether we can write there, the target's user can as well, and no third user can replace our files.

        In its own mount namespace a target can present any directory as its /tmp, such as one of root's.
        """
        folder = os.fstat(self._fd)
        is_for_all = folder.st_mode & stat.S_IWOTH and folder.st_mode & stat.S_ISVTX
        is_theirs = folder.st_uid == self._status.uid and not folder.st_mode & stat.S_IWOTH
        if not (is_for_all or is_theirs):
            return False
        name = self._name + ".try"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o600, dir_fd=self._fd))
        os.unlink(name, dir_fd=self._fd)
        return True


def remove_stale(status: Status) -> list[str]:
    """Remove the files that killed tools have left behind for a process; return their paths.

    A file is stale if the lock that its tool takes on its mailbox is free, and the file is older than a minute. Only regular
    files of the target's user or of our own user are removed.
    """
    removed = []
    for parts in _folders(status):
        with contextlib.suppress(OSError, HookdError):
            folder = open_local_directory(status.pid, parts)
            try:
                stale = [name for name in os.listdir(f"/proc/self/fd/{folder}") if _is_stale(name, folder, status)]  # noqa: PTH208
                for name in stale:
                    os.unlink(name, dir_fd=folder)
                    removed.append(f"/{'/'.join(parts)}/{name}")
            finally:
                os.close(folder)
    return removed


def _is_stale(name: str, folder: int, status: Status) -> bool:
    if not _NAME.fullmatch(name):
        return False
    file = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(file.st_mode) or file.st_uid not in (status.uid, os.geteuid()):
        return False
    if time.time() - file.st_mtime < _YOUNG_S:
        return False
    try:
        box = open_file(
            name.rpartition(".")[0] + ".box",
            lambda status: status.st_uid == file.st_uid,
            os.O_RDWR,
            dir_fd=folder,
        )
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(box, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(box)
    return True


def _folders(status: Status) -> tuple[tuple[str, ...], ...]:
    return (("dev", "shm"), ("tmp",), ("var", "tmp"), ("run", "user", str(status.uid)))
