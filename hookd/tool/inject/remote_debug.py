"""CPython's own remote debugging (PEP 768, 3.14 and newer): have a script run in another process without stopping it. Tool side.

The fields are written by us and not by `sys.remote_exec`, so that the tool may run any version of Python. Of
`eval_breaker` only the low byte is written: CPython's client rewrites all eight, and loses a bit that is set meanwhile.

Where they lie is told by a table, see `debug_table.py`.

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
"""Of `eval_breaker`: a signal, a pending call, an exception of another thread's. Each looks whether there is one."""


@dataclass(frozen=True)
class RemoteDebug:
    """The remote debugging of one interpreter's main thread.

    Attributes:
        is_enabled: whether whoever started the process allows it.
    """

    memory: Opened
    is_enabled: bool
    _breaker: int
    _pending: int
    _path: int
    _path_size: int

    def run_script(self, path: str) -> None:
        """Ask the main thread to run the script `path`, in the target's words, at its next safe point.

        Raises:
            AttachError: reason "memory", the fields do not lie where fields can lie.
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
        # One of these that is set between the read and the write would be lost: a signal was, until the next one came. The
        # others are set again by who needs them.
        self.memory.write(self._breaker, bytes([low | _PLEASE_STOP | _LOOK_AGAIN]))

    def cancel(self) -> None:
        """Take back a script that has not been run."""
        self.memory.write(self._pending, struct.pack("<i", 0))


def find(memory: Opened, python: Interpreter) -> RemoteDebug | None:
    """Find the remote debugging of a process; None where a check of what it stands on fails.

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
    """A directory in the target's file system in which both sides may have a file for a moment.

    Its names are the target's words: each component is opened below the target's root without following links, and
    files are made new, so that nothing planted there leads a tool that runs as root astray.

    Args:
        status: of the target.

    Raises:
        OSError: the target has no directory that both can use.
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
        """Give the path of a file as the target sees it."""
        return f"{self._path}/{self._name}{suffix}"

    def create(self, suffix: str) -> int:
        """Make a file that nobody else can open yet; give its descriptor, to be closed by the caller."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._name + suffix, flags, 0o600, dir_fd=self._fd)
        fcntl.flock(fd, fcntl.LOCK_EX)  # tells `remove_stale` that we live
        self._made.append(self._name + suffix)
        self._files.append(os.dup(fd))
        return fd

    def hand_over(self) -> None:
        """Give the files to the target's user."""
        for fd in self._files:
            if os.geteuid() == 0:
                os.fchown(fd, self._status.uid, self._status.gid)
            os.close(fd)
        self._files.clear()

    def remove(self) -> None:
        """Remove the files; the target may have done so already. Once only."""
        for name in self._made:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)
        os.close(self._fd)

    def _is_usable(self) -> bool:
        """Whether we can write there, the target's user could as well, and no third user can replace our files.

        In a mount namespace of its own a target shows any directory as its /tmp, such as one of root's.
        """
        found = os.fstat(self._fd)
        is_for_all = found.st_mode & stat.S_IWOTH and found.st_mode & stat.S_ISVTX
        is_theirs = found.st_uid == self._status.uid and not found.st_mode & stat.S_IWOTH
        if not (is_for_all or is_theirs):
            return False
        name = self._name + ".try"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o600, dir_fd=self._fd))
        os.unlink(name, dir_fd=self._fd)
        return True


def remove_stale(status: Status) -> list[str]:
    """Remove the files that killed tools have left for a process, and name them.

    A file is stale when nobody holds the lock on its mailbox that its tool has taken, and it is not quite new; only
    plain files that are the target's user's or our own are touched.
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
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (status.uid, os.geteuid()):
        return False
    if time.time() - found.st_mtime < _YOUNG_S:
        return False
    try:
        box = open_file(
            name.rpartition(".")[0] + ".box",
            lambda status: status.st_uid == found.st_uid,
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
