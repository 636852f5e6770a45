"""Read the facts about a process from /proc.

Read-only. For its memory see `memory.py`. Nothing here trusts the target: names and counts that it controls are capped, and
its paths are never opened as ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hookd.errors import AttachError, HookdError, NoSuchTarget
from hookd.tool.linux import bounded
from hookd.tool.linux.accounts import account_of
from hookd.tool.linux.waiter import WAITERS
from hookd.tool.linux.waiter_child import read_all

MAX_WORDS = 1 << 21
"""Bytes that are read of a command line or an environment, the size that Linux allows by default. A process may expose any
part of its memory in their place (prctl(PR_SET_MM_MAP)): 16 MiB of two-letter words took 685 MiB here."""


LOCKED = frozenset({"auxv", "cmdline", "environ", "io", "maps", "stack", "stat", "syscall", "wchan"})
"""Files of /proc/PID that take the lock of the address space, or the lock that an exec holds (`stat` and all links on
Linux 6.18, not on 6.1). A process may hold both forever."""


@dataclass(frozen=True)
class Status:
    """The lines of /proc/PID/status that decide whether and how to attach.

    Attributes:
        nspid: the pid as the process itself sees it, in its own pid namespace.
        state: one letter, as in proc(5).
        tracer: pid of the tracer, 0 for none.
        seccomp: 0 off, 1 strict, 2 filter.
    """

    pid: int
    nspid: int
    name: str
    state: str
    uid: int
    gid: int
    ppid: int
    tracer: int
    threads: int
    seccomp: int


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps; `inode` is 0 for a mapping without a file."""

    start: int
    end: int
    access: str
    offset: int
    path: str
    inode: int = 0


def read(pid: int, name: str, limit: int = 1 << 24) -> bytes:
    """Read /proc/PID/NAME.

    Raises:
        NoSuchTarget: the process does not exist (any more).
        PermissionError: the kernel denies access.
        AttachError: reason "unreadable", its address space is locked.
    """
    try:
        if name.rpartition("/")[2] in LOCKED:
            return bytes(WAITERS.call(account_of(pid), "read_name", pid, name, limit))
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_all(fd, limit)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise missing(pid, name, exc) from exc


def missing(pid: int, name: str, error: OSError) -> NoSuchTarget:
    """Return the error for a file or directory in /proc/PID that is not there."""
    hint = "`hookd ps` lists training processes."
    if not Path(f"/proc/{pid}").exists():
        return NoSuchTarget(f"there is no process {pid}", hint=hint)
    if has_ended(pid):  # a zombie lacks some files
        return NoSuchTarget(f"process {pid} has ended", hint=hint)
    # A kernel may be built without it.
    return NoSuchTarget(f"process {pid} has no /proc/{pid}/{name} ({error.strerror})", hint=hint)


def has_ended(pid: int) -> bool:
    """Whether a process is a zombie, or gone."""
    try:
        return re.search(rb"^State:\s*[ZX]", Path(f"/proc/{pid}/status").read_bytes(), re.MULTILINE) is not None
    except OSError:
        return True


def size(pid: int) -> bytes:
    """Return the size of a process's address space in pages, b"" if the process is gone or hidden.

    The size is read from /proc/PID/statm. This takes a few microseconds. Loading a library, mapping a page and an exec all change
    the size.
    """
    try:
        fd = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 64).partition(b" ")[0]
    except OSError:
        return b""
    finally:
        os.close(fd)


def status(pid: int) -> Status:
    """Read /proc/PID/status.

    Raises:
        NoSuchTarget: there is no such process.
    """
    fields = {
        key: value.strip()
        for key, _, value in (
            line.partition(":") for line in read(pid, "status").decode("utf-8", "replace").split("\n")
        )
    }
    return Status(
        pid=pid,
        nspid=int(fields.get("NSpid", str(pid)).split()[-1]),
        name=fields["Name"],
        state=fields["State"][:1],
        uid=int(fields["Uid"].split()[0]),
        gid=int(fields["Gid"].split()[0]),
        ppid=int(fields["PPid"]),
        tracer=int(fields.get("TracerPid", "0")),
        threads=int(fields.get("Threads", "0")),
        seccomp=int(fields.get("Seccomp", "0")),
    )


def start_ticks(pid: int) -> int:
    """Return the start time in ticks, field 22 of /proc/PID/stat; with the pid it identifies a process forever.

    Raises:
        NoSuchTarget: there is no such process.
    """
    return int(read(pid, "stat").rpartition(b")")[2].split()[19])


def image(pid: int) -> str:
    """Return a value that changes with each exec of a process: its auxiliary vector, as hex.

    The addresses in the auxiliary vector are random for each exec. If they are not, the same program has the same addresses,
    which serves as well.
    """
    return read(pid, "auxv").hex()


def program(pid: int) -> str:
    """Return a value that identifies the program that a process runs, for the short time of an attach.

    A process can change its auxiliary vector, and the system may not randomize addresses. Therefore the value includes the name
    of the executed file, which the process cannot choose. Over a longer time that name may change, if the file is replaced.
    """
    return f"{image(pid)} {link(pid, 'exe')}"


def require_program(pid: int, expected: str) -> None:
    """Check that a process still runs the inspected program.

    Raises:
        AttachError: reason "died".
    """
    if program(pid) != expected:
        raise lost(pid)


def lost(pid: int) -> AttachError:
    """Return the error for a process that has ended or runs another program than the inspected one."""
    with contextlib.suppress(OSError, NoSuchTarget):
        if image(pid):
            return AttachError(
                f"process {pid} became another program while hookd inspected it", reason="died", hint="Try again."
            )
    return AttachError(f"process {pid} ended while hookd was attaching", reason="died")


def is_same(pid: int, ticks: int) -> bool:
    """Whether a pid still belongs to the inspected process, which may be a zombie."""
    try:
        return start_ticks(pid) == ticks
    except (HookdError, OSError, LookupError, ValueError):
        return False


def require_same(pid: int, ticks: int) -> None:
    """Check that a pid still belongs to the inspected process; then all earlier reads by pid were of that process.

    Raises:
        AttachError: reason "died".
    """
    with contextlib.suppress(OSError, NoSuchTarget):
        if start_ticks(pid) == ticks:
            return
    raise AttachError(f"process {pid} ended while hookd inspected it", reason="died")


def boot_shift_ticks(pid: int) -> int:
    """Return the boot time offset of the process's time namespace relative to ours, in ticks.

    Field 22 of its /proc/PID/stat is larger by this offset when the process itself reads it. Source: time_namespaces(7).
    """
    return boot_offset_ticks(pid) - boot_offset_ticks(os.getpid())


def boot_offset_ticks(pid: int) -> int:
    """Return the ticks that the process's time namespace adds to the time since boot."""
    with contextlib.suppress(OSError, HookdError):
        for line in read(pid, "timens_offsets").splitlines():
            name, seconds, nanoseconds = line.split()
            if name in (b"boottime", b"7"):
                return round((int(seconds) + int(nanoseconds) / 1e9) * os.sysconf("SC_CLK_TCK"))
    return 0


def words(pid: int, name: str, limit: int = MAX_WORDS) -> list[str]:
    """Read a file of NUL-separated words such as cmdline, `limit` bytes at most."""
    return [os.fsdecode(word) for word in read(pid, name, limit).split(b"\0") if word]


def maps(pid: int) -> list[Mapping]:
    """Read /proc/PID/maps; empty for kernel threads and zombies."""
    return parse_maps(read(pid, "maps"))


def parse_maps(text: bytes) -> list[Mapping]:
    """Parse the lines of a /proc/PID/maps."""
    mappings = []
    for line in os.fsdecode(text).split("\n"):
        parts = line.split(None, 5)
        if len(parts) < 5:
            continue
        start, _, end = parts[0].partition("-")
        path = parts[5] if len(parts) > 5 else ""
        mappings.append(Mapping(int(start, 16), int(end, 16), parts[1], int(parts[2], 16), path, int(parts[4])))
    return mappings


def executable(pid: int) -> tuple[str, int]:
    """Return device and inode of the program that a process runs, ("", 0) if it has no mapping of it.

    They are read from its mappings. A request to the file system could block forever: the process may be its server.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionError: the kernel denies access.
    """
    path = os.fsencode(link(pid, "exe")).replace(b"\n", b"\\012")
    for line in read(pid, "maps").split(b"\n"):
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5] == path:
            return os.fsdecode(parts[3]), int(parts[4])
    return "", 0


def link(pid: int, name: str) -> str:
    """Read a symbolic link of /proc/PID, "" if it cannot be read.

    Never open the result: the target controls it.
    """
    with contextlib.suppress(OSError, HookdError):
        if pid == os.getpid():
            return str(Path(f"/proc/{pid}/{name}").readlink())
        return bounded.links(account_of(pid), [f"{pid}/{name}"])[0]
    return ""


def whereabouts(pid: int) -> str:
    """Describe the main thread's state in the kernel for a person; "" if the kernel does not show it."""
    facts = []
    with contextlib.suppress(OSError, NoSuchTarget):
        facts.append(f"state {status(pid).state}")
        number = read(pid, "syscall").decode().split()[0]
        facts.append("in no system call (running)" if number == "running" else f"in system call {number}")
        wchan = read(pid, "wchan").decode(errors="replace").strip("\0\n")
        if wchan not in ("", "0"):
            facts.append(f"kernel function {wchan}")
    return ", ".join(facts)


@functools.cache
def libc() -> ctypes.CDLL:
    """Load our own C library, with the prototypes used here."""
    lib = ctypes.CDLL(None, use_errno=True)
    lib.ptrace.restype = ctypes.c_long
    lib.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return lib


def is_running(pid: int, ticks: int) -> bool:
    """Whether the process still runs, and not another one with the same pid.

    A zombie does not run. A process of which only the main thread has ended looks like a zombie, but runs.

    Args:
        pid: of the process.
        ticks: its start, see `start_ticks`.

    Raises:
        OSError: it cannot be read now.
    """
    try:
        if start_ticks(pid) != ticks:
            return False
        now = status(pid)
    except (NoSuchTarget, LookupError, ValueError):  # it ended during the read
        return False
    except AttachError as exc:
        raise OSError(errno.EAGAIN, exc.message) from exc
    return now.state not in "ZX" or now.threads > 1


def has_memory(pid: int) -> bool:
    """Whether a process has an address space.

    An ending process loses this first, then its files, and last its pid.

    Source: kernel/exit.c `do_exit` (Linux 6.18).
    """
    return size(pid) not in (b"", b"0")


def require_alive(pid: int, ticks: int) -> None:
    """Check that the inspected process still runs.

    Raises:
        AttachError: reason "died".
    """
    if not is_running(pid, ticks):
        raise AttachError(f"process {pid} ended while hookd was attaching", reason="died")
