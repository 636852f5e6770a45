"""Detect OOM kills, from the counters of memory cgroups and the kernel's log.

The counter of a cgroup is `oom_kill` in memory.events (cgroup v2, descendants included) or memory.oom_control (v1, this cgroup
alone). It includes processes killed for the limit of any parent cgroup, and for a shortage of memory in the whole machine
(mm/oom_kill.c `__oom_kill_process`). It is incremented before the process gets the signal.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from hookd.tool.linux import cgroups, proc

KERNEL_LOG = Path("/dev/kmsg")
KILLED = "was killed by the OOM killer"
"""The end of a message about a process that the kernel has killed."""
_MAX_RECORDS = 50_000
_INITIAL_PID_SPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
# mm/oom_kill.c, Linux 3.10 to 6.18. Matched from the first character on: the process controls the text after the pid.
_KILLED = re.compile(
    r"(?:Memory cgroup out of memory: |Out of memory(?: \(oom_kill_allocating_task\))?: )?Killed process (\d+)\b"
)


def counter_of(pid: int) -> Path | None:
    """Return the file that counts the kills in a process's memory cgroup, or in the nearest parent that counts.

    None if there is none, or our own mounts do not show it.
    """
    names = ("memory.oom_control", "memory.events")
    files = (folder / name for folder in cgroups.folders(pid, "memory") for name in names)
    return next((file for file in files if file.exists()), None)


def kills(counter: Path) -> int | None:
    """Return the number of kills in a cgroup; None if it is gone, or the kernel does not count (before 4.13)."""
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text("ascii", "replace").splitlines():
            word, _, number = line.partition(" ")
            if word == "oom_kill":
                return int(number)
    return None


def killed(since_s: float) -> list[int] | None:
    """Return the pids of OOM kills in the kernel's log.

    Args:
        since_s: seconds since boot; older records are left out.

    Returns:
        None if the log may not be read, or its pids differ from ours because we run in a container.
    """
    if proc.link(os.getpid(), "ns/pid") != _INITIAL_PID_SPACE:
        return None
    try:
        fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return [pid for record in _records(fd) if (pid := victim(record, since_s)) is not None]
    finally:
        os.close(fd)


def _records(fd: int) -> list[str]:
    records: list[str] = []
    for _ in range(_MAX_RECORDS):
        try:
            records.append(os.read(fd, 8192).decode("utf-8", "replace"))
        except BrokenPipeError:  # overwritten meanwhile: the next read returns the oldest record left
            continue
        except OSError:
            break
    return records


def victim(record: str, since_s: float) -> int | None:
    """Return the pid of the OOM kill that a record of /dev/kmsg reports; None for any other record.

    The head of a record is priority (with the facility, 0 for the kernel itself), number, microseconds since boot.
    Source: Documentation/ABI/testing/dev-kmsg.
    """
    head, _, message = record.partition(";")
    match = _KILLED.match(message)
    words = head.split(",")
    if match is None or len(words) < 3 or not (words[0].isdigit() and words[2].isdigit()):
        return None
    is_kernels = int(words[0]) < 8
    return int(match[1]) if is_kernels and int(words[2]) / 1e6 >= since_s else None
