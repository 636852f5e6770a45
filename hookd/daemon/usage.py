"""What the operating system counts for a target."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Usage:
    """What the operating system counts for a process. None where it does not tell us."""

    cpu_s: float | None = None
    rss_bytes: int | None = None
    threads: int | None = None
    fds: int | None = None


def usage_of(process: psutil.Process, before: Usage) -> Usage:
    """Ask for what may be known; keep the last CPU time of a process that is going."""
    try:
        with process.oneshot():
            cpu = process.cpu_times()
            usage = Usage(cpu.user + cpu.system, process.memory_info().rss, process.num_threads(), _fds(process))
    except (psutil.Error, OSError):
        return Usage(before.cpu_s)
    return usage


def _fds(process: psutil.Process) -> int | None:
    try:
        # Linux 6.2 and newer count them as the size of the directory; to list ten thousand takes milliseconds.
        return os.stat(f"/proc/{process.pid}/fd").st_size or int(process.num_fds())  # noqa: PTH116
    except (psutil.Error, OSError):
        return None
