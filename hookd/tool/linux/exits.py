"""How a process has ended, by what the kernel tells about it. Tool side; reads only.

Two places know the status that the parent gets from wait(2), and at any moment one of them has it: until the parent has
asked, /proc/PID/stat of the zombie; from then on the pidfd, on Linux 6.15 and newer. On an older kernel a parent that
asks at once takes the answer with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
from typing import NamedTuple

from hookd.errors import HookdError
from hookd.tool.linux import proc

# include/uapi/linux/pidfd.h, Linux 6.15: struct pidfd_info in its first size, 64 bytes, and what asks for it.
_INFO = struct.Struct("=QQ11Ii")  # mask, cgroupid, pid, tgid, ppid, 8 ids, exit_code
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_EXIT = 1 << 3  # PIDFD_INFO_EXIT

_START_TICKS, _EXIT_CODE, _FLAGS = 22, 52, 9  # fields of /proc/PID/stat, proc(5)
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h
GOING_S = 1.5
"""How long a process that has let go of its memory and files may take until it counts as ended."""


class Exit(NamedTuple):
    """What is known of an end.

    Attributes:
        status: as wait(2) gives it, None where nobody tells.
        source: "pidfd", "zombie", "exec" (it is another program now), "alive" (it only has closed its page), or
            "" where nobody tells.
    """

    status: int | None
    source: str


def find(pid: int, ticks: int, image: str, pidfd: int = -1) -> Exit:
    """Find out how a process has ended that has, or has become another program, or seems to have.

    Args:
        pid: of the process.
        ticks: its start, see `proc.start_ticks`.
        image: as `proc.image` gave it in its life; "" if unknown.
        pidfd: opened in its life; -1 for none.
    """
    if is_alive(pid, ticks):
        now = _image(pid)
        if now:
            return Exit(None, "exec" if image and now != image else "alive")
    _await_end(pidfd)
    for status, source in ((_reaped(pidfd), "pidfd"), (_zombie(pid, ticks), "zombie"), (_reaped(pidfd), "pidfd")):
        if status is not None:  # asked once more: its parent may have come between the first and the second
            return Exit(status, source)
    return Exit(None, "")


def is_alive(pid: int, ticks: int) -> bool:
    """Whether a process is there and not even about to end: more than `proc.is_running` asks, which a death begins with."""
    fields = _stat(pid, ticks)
    return bool(fields) and fields[0] not in (b"Z", b"X") and not int(fields[_FLAGS - 3]) & _EXITING


def _image(pid: int) -> str:
    with contextlib.suppress(OSError, HookdError):
        return proc.image(pid)
    return ""


def _await_end(pidfd: int) -> None:
    """Wait shortly for who is just going: it has let go of its memory, or the signal that ends it has come, and it is no zombie yet."""
    if pidfd >= 0:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        waiting.poll(GOING_S * 1000)


def _reaped(pidfd: int) -> int | None:
    """Ask a pidfd whose process has been waited for; None if it has not, or the kernel does not tell (before 6.15)."""
    if pidfd < 0:
        return None
    info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return status if mask & _EXIT else None


def _zombie(pid: int, ticks: int) -> int | None:
    """Read the status of who has ended and was not waited for; None where it is not there or is not shown to us."""
    fields = _stat(pid, ticks)
    if not fields or fields[0] not in (b"Z", b"X") or len(fields) <= _EXIT_CODE - 3:
        return None
    status = int(fields[_EXIT_CODE - 3])
    # To who may not trace it the kernel shows 0 (fs/proc/array.c); the same right is needed to read this link.
    return status if status or proc.link(pid, "ns/user") else None


def _stat(pid: int, ticks: int) -> list[bytes]:
    """Give the fields of /proc/PID/stat from the third on, [] if it is not that process any more."""
    with contextlib.suppress(OSError, HookdError, ValueError, IndexError):
        fields = proc.read(pid, "stat").rpartition(b")")[2].split()
        if int(fields[_START_TICKS - 3]) == ticks:
            return fields
    return []


def container_init(pid: int) -> tuple[int, int] | None:
    """Find the first process of the container that a process runs in: its pid as we see it, and its start.

    None in our own pid namespace, and for that first process itself.
    """
    space = proc.link(pid, "ns/pid")
    if not space or space == proc.link(os.getpid(), "ns/pid"):
        return None
    with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
        one = proc.status(pid)
        while one.nspid != 1 and one.ppid and proc.link(one.ppid, "ns/pid") == space:
            one = proc.status(one.ppid)
        if one.nspid == 1 and one.pid != pid:
            return one.pid, proc.start_ticks(one.pid)
    return None
