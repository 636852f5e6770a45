"""What /proc says of a process, and its memory. Tool side; reads only, except `write_memory`.

Nothing here trusts the target: names and counts that it controls are capped, its paths are never opened as ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from hookd.errors import AttachError, HookdError, NoSuchTarget

MAX_WORDS = 1 << 21
"""Bytes of a command line or an environment that are read, as much as Linux gives a program by default. A process may
show any part of its memory in their place (prctl(PR_SET_MM_MAP)): 16 MiB of words of two letters took 685 MiB here."""


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
    """One line of /proc/PID/maps."""

    start: int
    end: int
    access: str
    offset: int
    path: str


def read(pid: int, name: str, limit: int = 1 << 24) -> bytes:
    """Read /proc/PID/NAME.

    Raises:
        NoSuchTarget: there is no such process (any more).
        PermissionError: the kernel does not show it to us.
    """
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(fd, limit)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as exc:
        raise NoSuchTarget(f"there is no process {pid}", hint="`hookd ps` lists training processes.") from exc


def _read_all(fd: int, limit: int) -> bytes:
    parts, size = [], 0
    while size < limit and (part := os.read(fd, min(limit - size, 1 << 16))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


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


def boot_shift_ticks(pid: int) -> int:
    """Give how much more the process's time namespace adds to the time since boot than ours does.

    Field 22 of its /proc/PID/stat is larger by that when it reads it itself. Source: time_namespaces(7).
    """

    def offset_s(of: int) -> float:
        with contextlib.suppress(OSError, HookdError):
            for line in read(of, "timens_offsets").splitlines():
                name, seconds, nanoseconds = line.split()
                if name in (b"boottime", b"7"):
                    return int(seconds) + int(nanoseconds) / 1e9
        return 0.0

    return round((offset_s(pid) - offset_s(os.getpid())) * os.sysconf("SC_CLK_TCK"))


def open_below_root(pid: int, parts: tuple[str, ...]) -> int:
    """Open a directory of the process's own file system, following no links; give its descriptor.

    Raises:
        OSError: it is not there, or a part of it is a link.
    """
    fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            inner = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_PATH | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def words(pid: int, name: str) -> list[str]:
    """Read a NUL-separated file, cmdline or environ, as far as MAX_WORDS."""
    return [os.fsdecode(word) for word in read(pid, name, MAX_WORDS).split(b"\0") if word]


def environ(pid: int) -> dict[str, str]:
    """Read the environment with which the process was started."""
    return {key: value for key, equals, value in (word.partition("=") for word in words(pid, "environ")) if equals}


def maps(pid: int) -> list[Mapping]:
    """Read /proc/PID/maps; empty for kernel threads and zombies."""
    found = []
    for line in os.fsdecode(read(pid, "maps")).split("\n"):
        parts = line.split(None, 5)
        if len(parts) < 5:
            continue
        start, _, end = parts[0].partition("-")
        path = parts[5] if len(parts) > 5 else ""
        found.append(Mapping(int(start, 16), int(end, 16), parts[1], int(parts[2], 16), path))
    return found


def link(pid: int, name: str) -> str:
    """Read a symbolic link of /proc/PID, "" where it cannot be read. Never a path to open: the target's words."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/{name}").readlink())
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


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def libc() -> ctypes.CDLL:
    """Load our own C library, with the prototypes used here."""
    lib = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_Iovec)
    for function in (lib.process_vm_readv, lib.process_vm_writev):
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong]
    lib.ptrace.restype = ctypes.c_long
    lib.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return lib


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Copy `size` bytes out of a process, without stopping it.

    Raises:
        OSError: EPERM, ESRCH, ENOSYS, or EFAULT when not all of it is mapped.
    """
    buffer = ctypes.create_string_buffer(size)
    _transfer(libc().process_vm_readv, pid, address, buffer, size)
    return buffer.raw


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Copy `data` into a process, without stopping it.

    Raises:
        OSError: as `read_memory`.
    """
    _transfer(libc().process_vm_writev, pid, address, ctypes.create_string_buffer(data, len(data)), len(data))


def _transfer(
    call: ctypes._NamedFuncPointer, pid: int, address: int, buffer: ctypes.Array[ctypes.c_char], size: int
) -> None:
    ours = _Iovec(ctypes.addressof(buffer), size)
    theirs = _Iovec(address, size)
    done = call(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if done != size:
        number = ctypes.get_errno() if done < 0 else 14  # a short copy is an EFAULT further on
        raise OSError(number, f"{os.strerror(number)}: memory of process {pid} at {address:#x}")


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
    return now.state not in "ZX" or now.threads > 1


def require_alive(pid: int, ticks: int) -> None:
    """Check that the process is still the one that was looked at.

    Raises:
        AttachError: reason "died".
    """
    if not is_running(pid, ticks):
        raise AttachError(f"process {pid} ended while hookd was attaching", reason="died")
