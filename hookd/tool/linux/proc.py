"""What /proc says of a process. Tool side; reads only. Its memory is in `memory.py`.

Nothing here trusts the target: names and counts that it controls are capped, its paths are never opened as ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from hookd.errors import AttachError, HookdError, NoSuchTarget
from hookd.tool.linux import bounded
from hookd.tool.linux.accounts import account_of
from hookd.tool.linux.waiter import WAITERS
from hookd.tool.linux.waiter_child import read_all

MAX_WORDS = 1 << 21
"""Bytes of a command line or an environment that are read, as much as Linux gives a program by default. A process may
show any part of its memory in their place (prctl(PR_SET_MM_MAP)): 16 MiB of words of two letters took 685 MiB here."""


LOCKED = frozenset({"auxv", "cmdline", "environ", "io", "maps", "stack", "stat", "syscall", "wchan"})
"""Files of /proc/PID for which the kernel takes the lock of the address space, or the one that an exec holds (`stat` and all links
on Linux 6.18, not on 6.1): a process may keep both for ever."""


@dataclass(frozen=True)
class Status:
    """The lines of /proc/PID/status that decide whether and how to attach.

    Attributes:
        nspid: the pid as the process itself sees it, in its own pid namespace.
        state: one letter, as in proc(5).
        tracer: pid of who traces it, 0 for nobody.
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
    """One line of /proc/PID/maps; `inode` is 0 where no file is behind it."""

    start: int
    end: int
    access: str
    offset: int
    path: str
    inode: int = 0


def read(pid: int, name: str, limit: int = 1 << 24) -> bytes:
    """Read /proc/PID/NAME.

    Raises:
        NoSuchTarget: there is no such process (any more).
        PermissionError: the kernel does not show it to us.
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
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc


def size(pid: int) -> bytes:
    """Give the size of a process's address space as /proc/PID/statm has it, b"" of one that is gone or hidden.

    It costs a few microseconds, and a library that is loaded, a page that is mapped and another program all change it.
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
    """Give field 22 of /proc/PID/stat: with the pid it names a process for ever.

    Raises:
        NoSuchTarget: there is no such process.
    """
    return int(read(pid, "stat").rpartition(b")")[2].split()[19])


def image(pid: int) -> str:
    """Give what tells the program that a process runs from one that it becomes by exec: where the kernel put it.

    The addresses in the auxiliary vector are random for each exec. Where they are not, the same program lies in the
    same place, which is as good.
    """
    return read(pid, "auxv").hex()


def program(pid: int) -> str:
    """Return what tells, for the short time of an attach, the program that a process runs from any other.

    It may have changed its auxiliary vector, and its system may not choose addresses at random: the name of the file that
    it executes, which it cannot choose, is compared too. Over a long time that name changes where the file is replaced.
    """
    return f"{image(pid)} {link(pid, 'exe')}"


def require_program(pid: int, wanted: str) -> None:
    """Check that a process runs the program that was looked at.

    Raises:
        AttachError: reason "died".
    """
    if program(pid) != wanted:
        raise lost(pid)


def lost(pid: int) -> AttachError:
    """Make the error for a process that does not run any more what was looked at: it ended, or runs another program."""
    with contextlib.suppress(OSError, NoSuchTarget):
        if image(pid):
            hint = "Try again."
            return AttachError(f"process {pid} became another program while it was looked at", reason="died", hint=hint)
    return AttachError(f"process {pid} ended while hookd was attaching", reason="died")


def is_same(pid: int, ticks: int) -> bool:
    """Whether a pid is still that of the process that was looked at, which may have ended and not been waited for."""
    try:
        return start_ticks(pid) == ticks
    except (HookdError, OSError, LookupError, ValueError):
        return False


def require_same(pid: int, ticks: int) -> None:
    """Check that a pid is still that of the process that was looked at, of which all that was read by pid is then.

    Raises:
        AttachError: reason "died".
    """
    with contextlib.suppress(OSError, NoSuchTarget):
        if start_ticks(pid) == ticks:
            return
    raise AttachError(f"process {pid} ended while it was looked at", reason="died")


def boot_shift_ticks(pid: int) -> int:
    """Give how much more the process's time namespace adds to the time since boot than ours does.

    Field 22 of its /proc/PID/stat is larger by that when it reads it itself. Source: time_namespaces(7).
    """
    return boot_offset_ticks(pid) - boot_offset_ticks(os.getpid())


def boot_offset_ticks(pid: int) -> int:
    """Return how much the process's time namespace adds to the time since boot."""
    with contextlib.suppress(OSError, HookdError):
        for line in read(pid, "timens_offsets").splitlines():
            name, seconds, nanoseconds = line.split()
            if name in (b"boottime", b"7"):
                return round((int(seconds) + int(nanoseconds) / 1e9) * os.sysconf("SC_CLK_TCK"))
    return 0


def words(pid: int, name: str, limit: int = MAX_WORDS) -> list[str]:
    """Read a file of words with zeros between them, cmdline, as far as `limit`."""
    return [os.fsdecode(word) for word in read(pid, name, limit).split(b"\0") if word]


def maps(pid: int) -> list[Mapping]:
    """Read /proc/PID/maps; empty for kernel threads and zombies."""
    return parse_maps(read(pid, "maps"))


def parse_maps(text: bytes) -> list[Mapping]:
    """Parse the lines of a /proc/PID/maps."""
    found = []
    for line in os.fsdecode(text).split("\n"):
        parts = line.split(None, 5)
        if len(parts) < 5:
            continue
        start, _, end = parts[0].partition("-")
        path = parts[5] if len(parts) > 5 else ""
        found.append(Mapping(int(start, 16), int(end, 16), parts[1], int(parts[2], 16), path, int(parts[4])))
    return found


def executable(pid: int) -> tuple[str, int]:
    """Return device and inode of the program that a process runs, ("", 0) where it maps none of it.

    They are those of its mappings: to ask the file system itself, of which the process may be the server, could wait for
    ever.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionError: the kernel does not show it to us.
    """
    path = os.fsencode(link(pid, "exe")).replace(b"\n", b"\\012")
    for line in read(pid, "maps").split(b"\n"):
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5] == path:
            return os.fsdecode(parts[3]), int(parts[4])
    return "", 0


def link(pid: int, name: str) -> str:
    """Read a symbolic link of /proc/PID, "" where it cannot be read. Never a path to open: the target's words."""
    with contextlib.suppress(OSError, HookdError):
        if pid == os.getpid():
            return str(Path(f"/proc/{pid}/{name}").readlink())
        return bounded.links(account_of(pid), [f"{pid}/{name}"])[0]
    return ""


def whereabouts(pid: int) -> str:
    """Say in a few words where the main thread is, for a person; "" when the kernel does not tell."""
    told = []
    with contextlib.suppress(OSError, NoSuchTarget):
        told.append(f"state {status(pid).state}")
        number = read(pid, "syscall").decode().split()[0]
        told.append("in no system call (running)" if number == "running" else f"in system call {number}")
        wchan = read(pid, "wchan").decode(errors="replace").strip("\0\n")
        if wchan not in ("", "0"):
            told.append(f"kernel function {wchan}")
    return ", ".join(told)


@functools.cache
def libc() -> ctypes.CDLL:
    """Load our own C library, with the prototypes used here."""
    lib = ctypes.CDLL(None, use_errno=True)
    lib.ptrace.restype = ctypes.c_long
    lib.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return lib


def is_running(pid: int, ticks: int) -> bool:
    """Tell whether the very process still runs, not another that has its pid now; a zombie does not.

    A process of which only the main thread has ended looks like a zombie, and runs.

    Args:
        pid: of the process.
        ticks: its start, see `start_ticks`.

    Raises:
        OSError: it cannot be looked at now.
    """
    try:
        if start_ticks(pid) != ticks:
            return False
        now = status(pid)
    except (NoSuchTarget, LookupError, ValueError):  # it goes while it is read
        return False
    except AttachError as exc:
        raise OSError(errno.EAGAIN, exc.message) from exc
    return now.state not in "ZX" or now.threads > 1


def has_memory(pid: int) -> bool:
    """Whether a process has an address space: a process that ends loses it first, then its files, and at last its pid.

    Source: kernel/exit.c `do_exit` (Linux 6.18).
    """
    return size(pid) not in (b"", b"0")


def require_alive(pid: int, ticks: int) -> None:
    """Check that the process is still the one that was looked at.

    Raises:
        AttachError: reason "died".
    """
    if not is_running(pid, ticks):
        raise AttachError(f"process {pid} ended while hookd was attaching", reason="died")
