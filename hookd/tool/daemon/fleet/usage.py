"""The operating system's counts for a target, read in ways that never block.

/proc/PID/stat may block, see `proc.LOCKED`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from hookd.errors import HookdError
from hookd.tool.linux import proc

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CLOCK_OF_ALL_THREADS = 2  # CPUCLOCK_SCHED of include/linux/posix-timers_types.h (Linux 6.18)


@dataclass(frozen=True)
class Usage:
    """The operating system's counts for a process; None if unknown."""

    cpu_s: float | None = None
    rss_bytes: int | None = None
    threads: int | None = None
    fds: int | None = None


def usage_of(pid: int, before: Usage) -> Usage:
    """Return the counts that can be read. A process that is ending keeps its last CPU time."""
    try:
        cpu_s = time.clock_gettime(_cpu_clock(pid))
        rss_bytes = int(proc.read(pid, "statm").split()[1]) * _PAGE_BYTES
        # Each directory has two links, and this one has one more per thread (fs/proc/base.c, `proc_task_getattr`).
        threads = os.stat(f"/proc/{pid}/task").st_nlink - 2  # noqa: PTH116
        return Usage(cpu_s, rss_bytes, threads, _fds(pid))
    except (HookdError, OSError, LookupError, ValueError):
        return Usage(before.cpu_s)


def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time. It is composed as in clock_getcpuclockid(3) (glibc 2.41)."""
    return ~pid << 3 | _CLOCK_OF_ALL_THREADS


def _fds(pid: int) -> int | None:
    try:
        # Linux 6.2 and newer report the number as the size of the directory; listing ten thousand takes milliseconds.
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH116, PTH208
    except OSError:
        return None
