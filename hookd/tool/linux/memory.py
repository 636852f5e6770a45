"""The memory of a target: one object through which an attach reads and writes, bound to one program. Tool side, injector.

A pid is no name for memory: between a check and a write the process may have become another program, one that runs as
root. The kernel binds /proc/PID/mem and /proc/PID/maps to the address space that the process has when they are opened
(fs/proc/base.c, `mem_open`). After an exec they reach nothing, and the new program cannot be reached through them.
"""

from __future__ import annotations

import errno
import math
import os
import time
from typing import TYPE_CHECKING

from hookd.errors import AttachError
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import account_of
from hookd.tool.linux.waiter import WAITERS

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_LAST = (1 << 63) - 1
_MOST_MAPS = 1 << 24


class Memory:
    """The address space of one program.

    Args:
        pid: of its process, for messages.
        fd: of /proc/PID/mem, which this object does not own.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd = pid, fd

    def read(self, address: int, size: int) -> bytes:
        """Copy `size` bytes, without stopping the process.

        Raises:
            OSError: EFAULT when not all of it is mapped, ESRCH when the program has ended.
        """
        self._require_address(address, size)
        try:
            data = self._pread(size, address)
        except OSError as exc:
            raise self._fault(address) if exc.errno == errno.EIO else exc from exc
        self._require_whole(len(data), size, address)
        return data

    def write(self, address: int, data: bytes, until: float = math.inf) -> None:
        """Write `data`, without stopping the process. The kernel ignores the protection of private pages here.

        Args:
            address: where.
            data: what.
            until: the moment of the monotonic clock after which it is not to be written.

        Raises:
            OSError: as `read`; ETIMEDOUT, that moment is over.
        """
        self._require_address(address, len(data))
        try:
            done = self._pwrite(data, address, until)
        except OSError as exc:
            raise self._fault(address) if exc.errno == errno.EIO else exc from exc
        self._require_whole(done, len(data), address)

    def _pread(self, size: int, address: int) -> bytes:
        return os.pread(self.fd, size, address)

    def _pwrite(self, data: bytes, address: int, until: float) -> int:
        if time.monotonic() > until:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return os.pwrite(self.fd, data, address)

    def _require_address(self, address: int, size: int) -> None:
        if not 0 <= address <= _LAST - size:  # the target's word
            raise self._fault(address)

    def _require_whole(self, done: int, size: int, address: int) -> None:
        if not done < size:
            return
        if done:
            raise self._fault(address)
        raise OSError(errno.ESRCH, f"process {self.pid} ended or became another program")

    def _fault(self, address: int) -> OSError:
        return OSError(errno.EFAULT, f"{os.strerror(errno.EFAULT)}: memory of process {self.pid} at {address:#x}")


class Opened(Memory):
    """The memory of a process, with its mappings. Owns the descriptors; a child waits for what is read, see `waiter.py`.

    Args:
        pid: of the process.
        program: what it must run, see `proc.program`.

    Raises:
        AttachError: reason "died", it runs another program.
        OSError: it may not be traced.
    """

    def __init__(self, pid: int, program: str) -> None:
        super().__init__(pid, _open(pid, "mem", os.O_RDWR))
        self._maps, self._user = -1, account_of(pid)
        try:
            self._maps = _open(pid, "maps", os.O_RDONLY)
            proc.require_program(pid, program)  # after opening: both belong to this program
        except BaseException:
            self.close()
            raise

    def mappings(self) -> list[proc.Mapping]:
        """Read the mappings as they are now; empty when the program has ended."""
        return proc.parse_maps(WAITERS.read(self._user, self._maps, _MOST_MAPS))

    def _pread(self, size: int, address: int) -> bytes:
        return WAITERS.pread(self._user, self.fd, size, address)

    def _pwrite(self, data: bytes, address: int, until: float) -> int:
        return WAITERS.pwrite(self._user, self.fd, data, address, until)

    def require_private(self, address: int, size: int, *, may_be_file: bool = False) -> None:
        """Check that a range may be written: that it lies in private memory of the program which is writable.

        Args:
            address: where it begins.
            size: in bytes.
            may_be_file: the pages may come from a file, as a library's variables do.

        Raises:
            AttachError: reasons "memory", and "died" if the program has ended.
        """
        at, mappings = address, self.mappings()
        for one in mappings:
            is_private = one.access == "rw-p" and (may_be_file or not one.inode)
            if is_private and one.start <= at < one.end:
                at = one.end
        if at < address + size:
            if not mappings:
                raise proc.lost(self.pid)
            raise AttachError(
                f"process {self.pid} has no private writable memory at {address:#x}, where it says that hookd should write",
                reason="memory", hint="Its C library or interpreter is not what it seems: hookd does not attach to it.",
            )  # fmt: skip

    def close(self) -> None:
        """Close the descriptors; may be called again."""
        for fd in (self.fd, self._maps):
            if fd >= 0:
                os.close(fd)
        self.fd = self._maps = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(pid: int, name: str, flags: int) -> int:
    try:
        return int(WAITERS.call_as_ancestor(account_of(pid), "open_name", pid, name, flags))
    except FileNotFoundError as exc:
        raise OSError(errno.ESRCH, f"there is no process {pid}") from exc
