"""Check that a process has enough memory, threads, mappings and descriptors left for an agent.

Read-only. The resources of an agent count against the target's limits. If a memory cgroup reaches its limit, the kernel kills
the training. If no thread or descriptor is left, an attach fails half-way, and the training's own next open fails as well.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import AttachError, HookdError
from hookd.tool.linux import cgroups, proc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MEMORY = 48 << 20
"""Bytes. An agent with the default plugins takes 20 to 30 MiB, most of it while its modules are imported."""
ADDRESSES = 320 << 20
"""Bytes: MEMORY, three stacks, and the reservation of glibc's allocator for each thread (64 MiB, malloc/arena.c HEAP_MAX_SIZE).
If a thread gets no memory for the thread-local data of torch, glibc ends the process: observed with 48 MiB left."""
THREADS, MAPPINGS, DESCRIPTORS = 6, 128, 12
"""An attach with the default plugins took 3, 34 and 6; the training needs some as well."""
_FORCE = "--force attaches anyway."
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_LOAD, _MEMORY, _OVERCOMMIT = Path("/proc/loadavg"), Path("/proc/meminfo"), Path("/proc/sys/vm/overcommit_memory")
_NEVER = 2  # include/uapi/linux/mman.h OVERCOMMIT_NEVER
_KILLS, _THROTTLES = "the kernel could kill the training", "the kernel could throttle the training until it hardly runs"
_LIMITS = {  # usage, and what happens above the limit
    "memory.limit_in_bytes": ("memory.usage_in_bytes", _KILLS),
    "memory.max": ("memory.current", _KILLS),
    "memory.high": ("memory.current", _THROTTLES),
}
_RECLAIMABLE = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


def require(pid: int, maps: Sequence[proc.Mapping]) -> None:
    """Check that the process has enough resources left, as far as we can see.

    Args:
        pid: of the process.
        maps: its mappings.

    Raises:
        AttachError: reason "no-memory", "no-threads", "no-mappings" or "no-descriptors".
    """
    for shortage in shortages(pid, maps):
        raise shortage


def shortages(pid: int, maps: Sequence[proc.Mapping]) -> Iterator[AttachError]:
    """Yield an error for each resource that would be short in an attach."""
    limits = _limits(pid)
    yield from _memory(pid)
    yield from _addresses(pid, limits)
    yield from _committed()
    yield from _threads(pid, limits)
    yield from _mappings(pid, maps)
    yield from _descriptors(pid, limits)


def memory_left(pid: int) -> int | None:
    """Return how many bytes a process can still take: of the machine, and of its memory cgroups; None if unknown."""
    found = [left for left, _ in _memory_left(pid)]
    with contextlib.suppress(OSError, LookupError, ValueError):
        pairs = (line.split() for line in _MEMORY.read_text().splitlines())
        found.append({pair[0]: int(pair[1]) for pair in pairs}["MemAvailable:"] << 10)
    return max(0, min(found)) if found else None


def _memory(pid: int) -> Iterator[AttachError]:
    left, effect = min(_memory_left(pid), default=(MEMORY, ""))
    if left < MEMORY:
        yield AttachError(
            f"the memory cgroup of process {pid} has {max(0, left) >> 20} MiB left, and an agent needs up to "
            f"{MEMORY >> 20} MiB: {effect}", reason="no-memory",
            hint=f"Raise the limit of its container or job, or start it with `hookd run -- ...`. {_FORCE}",
        )  # fmt: skip


def _memory_left(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the bytes left under each memory limit of a process's cgroups, and what happens above it."""
    for group in cgroups.folders(pid, "memory"):
        for limit, (usage, effect) in _LIMITS.items():
            with contextlib.suppress(OSError, ValueError):  # it is not there, or has no limit
                yield _number(group / limit) - _number(group / usage) + _reclaimable(group), effect


def _reclaimable(group: Path) -> int:
    """Return the bytes of a cgroup's page cache, which the kernel can reclaim."""
    pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    counts = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    names = _RECLAIMABLE[2:] if "total_inactive_file" in counts else _RECLAIMABLE[:2]
    return sum(int(counts.get(name, 0)) for name in names)


def _addresses(pid: int, limits: dict[str, int]) -> Iterator[AttachError]:
    """Check RLIMIT_AS (all mappings) and RLIMIT_DATA (writable private mappings)."""
    # Columns of /proc/PID/statm, in pages: size, and (6th) data with stacks.
    for name, option, column, needed in (
        ("Max address space", "as", 0, ADDRESSES),
        ("Max data size", "data", 5, 2 * MEMORY),
    ):
        with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
            used = int(proc.read(pid, "statm").split()[column]) * os.sysconf("SC_PAGESIZE")
            left = limits[name] - used
            if left < needed:
                yield AttachError(
                    f"process {pid} can map {max(0, left) >> 20} more MiB (RLIMIT_{option.upper()}), and an agent maps up to "
                    f"{needed >> 20} MiB", reason="no-memory", hint=f"prlimit --pid {pid} --{option}=unlimited. {_FORCE}",
                )  # fmt: skip


def _committed() -> Iterator[AttachError]:
    """Check the commit limit of the machine, if the kernel does not overcommit memory."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        if _number(_OVERCOMMIT) != _NEVER:
            return
        pairs = (line.split() for line in _MEMORY.read_text().splitlines())
        kib = {pair[0]: int(pair[1]) for pair in pairs}
        left = (kib["CommitLimit:"] - kib["Committed_AS:"]) << 10
        if left < 2 * MEMORY:
            yield AttachError(
                f"this machine can commit {max(0, left) >> 20} more MiB (vm.overcommit_memory=2), and an agent needs up to "
                f"{2 * MEMORY >> 20} MiB", reason="no-memory", hint=f"Raise vm.overcommit_ratio. {_FORCE}",
            )  # fmt: skip


def _threads(pid: int, limits: dict[str, int]) -> Iterator[AttachError]:
    left = min(_threads_left(pid, limits), default=THREADS)
    if left < THREADS:
        yield AttachError(
            f"process {pid} can start {max(0, left)} more threads, and an agent needs {THREADS}",
            reason="no-threads",
            hint=f"Raise pids.max of its container or job (in Kubernetes podPidsLimit), or its RLIMIT_NPROC. {_FORCE}",
        )


def _threads_left(pid: int, limits: dict[str, int]) -> Iterator[int]:
    for group in cgroups.folders(pid, "pids"):
        with contextlib.suppress(OSError, ValueError):
            yield _number(group / "pids.max") - _number(group / "pids.current")
    with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
        most, uid = limits["Max processes"], proc.status(pid).uid
        # RLIMIT_NPROC does not bind root. It counts all threads of a user. Counting those is slow, so compare first with the
        # number of all threads in the system, which the kernel has counted already.
        if uid != 0 and most < int(_LOAD.read_text().split()[3].partition("/")[2]) + THREADS:
            yield most - _threads_of(uid)


def _threads_of(uid: int) -> int:
    """Count the threads of all visible processes of a user."""
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208  names only
        if name.isdecimal():
            with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
                status = proc.status(int(name))
                count += status.threads if status.uid == uid else 0
    return count


def _mappings(pid: int, maps: Sequence[proc.Mapping]) -> Iterator[AttachError]:
    with contextlib.suppress(OSError, ValueError):
        left = _number(_MOST_MAPPINGS) - len(maps)
        if left < MAPPINGS:
            yield AttachError(
                f"process {pid} can create {max(0, left)} more mappings, and an agent needs {MAPPINGS}",
                reason="no-mappings",
                hint=f"sysctl vm.max_map_count={_number(_MOST_MAPPINGS) * 2}; the limit applies to each process. {_FORCE}",
            )


def _descriptors(pid: int, limits: dict[str, int]) -> Iterator[AttachError]:
    with contextlib.suppress(OSError, HookdError, LookupError, ValueError):
        most = limits["Max open files"]
        left = most - sum(int(name) < most for name in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  names only
        if left < DESCRIPTORS:
            yield AttachError(
                f"process {pid} can open {left} more descriptors, and an agent needs {DESCRIPTORS}",
                reason="no-descriptors", hint=f"prlimit --pid {pid} --nofile={max(2 * most, 1024)}. {_FORCE}",
            )  # fmt: skip


def _limits(pid: int) -> dict[str, int]:
    """Return the soft limits of a process that are not "unlimited", by the names in /proc/PID/limits."""
    limits = {}
    with contextlib.suppress(OSError, HookdError):
        for line in proc.read(pid, "limits").decode().splitlines():
            soft = line[26:].split()[:1]
            if soft and soft[0].isdecimal():
                limits[line[:26].rstrip()] = int(soft[0])
    return limits


def _number(file: Path) -> int:
    """Return the number in a file.

    Raises:
        OSError: the file does not exist.
        ValueError: the content is not a number: "max".
    """
    return int(file.read_text())
