"""Whether the kernel has killed for want of memory: what the memory cgroups count, and what its log says. Tool side.

The count of a cgroup is `oom_kill` of memory.events (cgroup v2, of all below it too) or of memory.oom_control (v1, of
it alone). It counts those killed for the limit of any cgroup above it, and for want of memory in the whole machine
(mm/oom_kill.c `__oom_kill_process`), before they get the signal.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path, PurePosixPath

from hookd.attach import proc
from hookd.errors import HookdError

KERNEL_LOG = Path("/dev/kmsg")
_MAX_RECORDS = 50_000
_INITIAL_PID_SPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
# mm/oom_kill.c, Linux 3.10 to 6.18. From its first character on: what follows the pid is the process's own word.
_KILLED = re.compile(
    r"(?:Memory cgroup out of memory: |Out of memory(?: \(oom_kill_allocating_task\))?: )?Killed process (\d+)\b"
)


def counter_of(pid: int, mounts: str | None = None) -> Path | None:
    """Find the file that counts the kills in a process's memory cgroup, or in the nearest one above that counts.

    None where it has none, or lies where our own mounts do not show it.

    Args:
        pid: of the process.
        mounts: instead of our own /proc/self/mountinfo.
    """
    try:
        lines = proc.read(pid, "cgroup").decode("utf-8", "surrogateescape").splitlines()
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape") if mounts is None else mounts
    except (OSError, HookdError):
        return None
    parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for kind, name, wanted in (("cgroup", "memory.oom_control", "memory"), ("cgroup2", "memory.events", "")):
        for _, controllers, path in parts:
            if wanted in controllers.split(",") and (found := _below(mounts, kind, path, name)) is not None:
                return found
    return None


def _below(mounts: str, kind: str, path: str, name: str) -> Path | None:
    for line in mounts.splitlines():
        fields, _, tail = line.partition(" - ")
        words, after = fields.split(), tail.split()
        is_of_memory = kind == "cgroup2" or (len(after) > 2 and "memory" in after[2].split(","))
        if len(words) < 5 or not after or after[0] != kind or not is_of_memory:
            continue
        root, mount = (PurePosixPath(_plain(word)) for word in words[3:5])
        try:
            inner = PurePosixPath(path).relative_to(root)
        except ValueError:
            continue
        if ".." not in inner.parts and (found := _nearest(Path(mount), inner, name)) is not None:
            return found
    return None


def _nearest(mount: Path, inner: PurePosixPath, name: str) -> Path | None:
    while not (found := mount / inner / name).exists():
        if inner == PurePosixPath():
            return None
        inner = inner.parent
    return found


def _plain(word: str) -> str:
    """Undo the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def kills(counter: Path) -> int | None:
    """Read how many were killed in a cgroup so far; None where it is gone, or the kernel does not count (before 4.13)."""
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text("ascii", "replace").splitlines():
            word, _, number = line.partition(" ")
            if word == "oom_kill":
                return int(number)
    return None


def killed(since_s: float) -> list[int] | None:
    """Give the pids that the kernel's log says were killed for want of memory.

    Args:
        since_s: seconds since boot; what is older is left out.

    Returns:
        None where the log may not be read, or its pids are not those that we see: in a container.
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
    found: list[str] = []
    for _ in range(_MAX_RECORDS):
        try:
            found.append(os.read(fd, 8192).decode("utf-8", "replace"))
        except BrokenPipeError:  # overwritten meanwhile: the next read gives the oldest that is left
            continue
        except OSError:
            break
    return found


def victim(record: str, since_s: float) -> int | None:
    """Read from a record of /dev/kmsg who was killed for want of memory; None if it tells of nothing like that.

    Its head is priority (with the facility, 0 for the kernel itself), number, microseconds since boot.
    Source: Documentation/ABI/testing/dev-kmsg.
    """
    head, _, message = record.partition(";")
    match = _KILLED.match(message)
    words = head.split(",")
    if match is None or len(words) < 3 or not (words[0].isdigit() and words[2].isdigit()):
        return None
    is_kernels = int(words[0]) < 8
    return int(match[1]) if is_kernels and int(words[2]) / 1e6 >= since_s else None
