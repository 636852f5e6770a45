"""Find out from the kernel how a process ended. Read-only.

The kernel exposes the status that the parent gets from wait(2) in two places, one at a time: in /proc/PID/stat of the zombie
until the parent has waited, and from then on through the pidfd, on Linux 6.15 and newer. On an older kernel the status is
lost if the parent waits at once.
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

# include/uapi/linux/pidfd.h, Linux 6.15: the first version of struct pidfd_info, 64 bytes, and the ioctl that fills it.
_INFO = struct.Struct("=QQ11Ii")  # mask, cgroupid, pid, tgid, ppid, 8 ids, exit_code
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_EXIT = 1 << 3  # PIDFD_INFO_EXIT

_START_TICKS, _EXIT_CODE, _FLAGS = 22, 52, 9  # fields of /proc/PID/stat, proc(5)
_EXITING = 0x4  # PF_EXITING of include/linux/sched.h
GOING_S = 1.5
"""Time in which a process that has released its memory and files is expected to end."""


class Exit(NamedTuple):
    """How a process ended, as far as known.

    Attributes:
        status: as from wait(2); None if unknown.
        source: "pidfd", "zombie", "exec" (it is another program now), "alive" (it has only closed its page), or
            "" if unknown.
    """

    status: int | None
    source: str


def find(pid: int, ticks: int, image: str, pidfd: int = -1) -> Exit:
    """Find out how a process ended that has ended, has become another program, or seems to have.

    Args:
        pid: of the process.
        ticks: its start, see `proc.start_ticks`.
        image: of `proc.image` while it ran; "" if unknown.
        pidfd: opened while it ran; -1 for none.
    """
    if is_alive(pid, ticks):
        now = _image(pid)
        if now:
            return Exit(None, "exec" if image and now != image else "alive")
    _await_end(pidfd)
    for status, source in ((_reaped(pidfd), "pidfd"), (_zombie(pid, ticks), "zombie"), (_reaped(pidfd), "pidfd")):
        if status is not None:  # the pidfd is asked twice: the parent may have waited between the first two
            return Exit(status, source)
    return Exit(None, "")


def is_alive(pid: int, ticks: int) -> bool:
    """Whether a process exists and has not begun to exit; `proc.is_running` still holds for one that is exiting."""
    fields = _stat(pid, ticks)
    return bool(fields) and fields[0] not in (b"Z", b"X") and not int(fields[_FLAGS - 3]) & _EXITING


def _image(pid: int) -> str:
    with contextlib.suppress(OSError, HookdError):
        return proc.image(pid)
    return ""


def _await_end(pidfd: int) -> None:
    """Wait briefly for a process that has begun to exit, but is not a zombie yet."""
    if pidfd >= 0:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        waiting.poll(GOING_S * 1000)


def _reaped(pidfd: int) -> int | None:
    """Return the status of a reaped process; None if it is not reaped, or the kernel is older than 6.15."""
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
    """Return the status of a zombie; None if there is none, or the kernel does not show its status."""
    fields = _stat(pid, ticks)
    if not fields or fields[0] not in (b"Z", b"X") or len(fields) <= _EXIT_CODE - 3:
        return None
    status = int(fields[_EXIT_CODE - 3])
    # The kernel shows 0 to a reader that may not trace the process (fs/proc/array.c); reading this link needs the same right.
    return status if status or proc.link(pid, "ns/user") else None


def _stat(pid: int, ticks: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on, [] if the pid is not that process any more."""
    with contextlib.suppress(OSError, HookdError, ValueError, IndexError):
        fields = proc.read(pid, "stat").rpartition(b")")[2].split()
        if int(fields[_START_TICKS - 3]) == ticks:
            return fields
    return []


def container_init(pid: int) -> tuple[int, int] | None:
    """Return the init process of a process's container: its pid in our namespace, and its start.

    None in our own pid namespace, and for the init process itself.
    """
    namespace = proc.link(pid, "ns/pid")
    if not namespace or namespace == proc.link(os.getpid(), "ns/pid"):
        return None
    with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
        ancestor = proc.status(pid)
        while ancestor.nspid != 1 and ancestor.ppid and proc.link(ancestor.ppid, "ns/pid") == namespace:
            ancestor = proc.status(ancestor.ppid)
        if ancestor.nspid == 1 and ancestor.pid != pid:
            return ancestor.pid, proc.start_ticks(ancestor.pid)
    return None
