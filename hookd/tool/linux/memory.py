"""Read and write the memory of a target, bound to one program.

The tool and the injector use this module. A pid does not identify an address space: between a check and a write the process may
have become another program, one that runs as root. The kernel binds /proc/PID/mem and /proc/PID/maps to the address space that
the process has when they are opened (fs/proc/base.c, `mem_open`). After an exec they are empty, and the new program cannot be
reached through them.
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
        """Return a copy of `size` bytes, without stopping the process.

        Raises:
            OSError: EFAULT if a part is not mapped, ESRCH if the program has ended.
        """
        self._require_address(address, size)
        try:
            data = self._pread(size, address)
        except OSError as exc:
            raise self._fault(address) if exc.errno == errno.EIO else exc from exc
        self._require_whole(len(data), size, address)
        return data

    def write(self, address: int, data: bytes, until: float = math.inf) -> None:
        """Write `data`, without stopping the process.

        The kernel ignores the protection of private pages here.

        Args:
            address: of the first byte.
            data: the bytes to write.
            until: deadline in seconds of the monotonic clock; nothing is written after it.

        Raises:
            OSError: as `read`; ETIMEDOUT if the deadline has passed.
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
        if not 0 <= address <= _LAST - size:  # the address may come from the target
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
    """The memory of a process and its mappings.

    Owns the descriptors; a child process does the reads, see `waiter.py`.

    Args:
        pid: of the process.
        program: that it must run, see `proc.program`.

    Raises:
        AttachError: reason "died", it runs another program.
        OSError: we may not trace it.
    """

    def __init__(self, pid: int, program: str) -> None:
        super().__init__(pid, _open(pid, "mem", os.O_RDWR))
        self._maps, self._user = -1, account_of(pid)
        try:
            self._maps = _open(pid, "maps", os.O_RDONLY)
            proc.require_program(pid, program)  # after both opens, so that both belong to this program
        except BaseException:
            self.close()
            raise

    def mappings(self) -> list[proc.Mapping]:
        """Read the current mappings; empty if the program has ended."""
        return proc.parse_maps(WAITERS.read(self._user, self._maps, _MOST_MAPS))

    def _pread(self, size: int, address: int) -> bytes:
        return WAITERS.pread(self._user, self.fd, size, address)

    def _pwrite(self, data: bytes, address: int, until: float) -> int:
        return WAITERS.pwrite(self._user, self.fd, data, address, until)

    def require_private(self, address: int, size: int, *, may_be_file: bool = False) -> None:
        """Check that a range lies in private writable memory of the program.

        Args:
            address: of the first byte.
            size: in bytes.
            may_be_file: whether the pages may come from a file, as a library's variables do.

        Raises:
            AttachError: reason "memory", or "died" if the program has ended.
        """
        at, mappings = address, self.mappings()
        for mapping in mappings:
            is_private = mapping.access == "rw-p" and (may_be_file or not mapping.inode)
            if is_private and mapping.start <= at < mapping.end:
                at = mapping.end
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
