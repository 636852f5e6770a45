"""Run a command in a Debian root of another architecture, under qemu-user.

The kernel is told of the emulator (binfmt_misc) in a user namespace of its own, which Linux 6.7 and newer allow, so nothing changes for the
rest of the machine. Needs root, and Debian's `qemu-user-static`.

    python -m tests.arm.enter ROOT COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

EMULATOR = "/usr/bin/qemu-aarch64-static"
# Programs of 64-bit ARM, by the first bytes of their file. F: the emulator is opened now, so it need not be in the root.
_PROGRAMS = (
    r":hookd-aarch64:M::\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:%s:F"
)
_NEW_NAMESPACES = (
    0x10000000 | 0x20000 | 0x20000000 | 0x4000000
)  # of users, mounts, pids and the host's name (linux/sched.h)
_HOST = b"localhost"  # the name that the root can resolve
_BIND, _PRIVATE, _RECURSIVE = 0x1000, 1 << 18, 0x4000  # linux/mount.h
_DIE_WITH_PARENT = 1  # linux/prctl.h
_ALL_USERS = "0 0 4294967295"
ENVIRONMENT = {
    "HOME": "/root",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
    # Without pointer authentication, which Debian's programs use everywhere, and whose emulation takes five times as long.
    "QEMU_CPU": "neoverse-n1",
}
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, place: Path | str, kind: str | None, flags: int = 0) -> None:
    done = _libc.mount(source.encode(), str(place).encode(), kind and kind.encode(), flags, None)
    _checked(done, f"mount {place}")


def enter(root: Path, command: list[str], binds: dict[Path, str] | None = None) -> int:
    """Run a command in `root` and return its exit status.

    Args:
        root: the Debian root.
        command: the command, by its path there.
        binds: directories that are seen there, by their path there.
    """
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        _checked(_libc.unshare(_NEW_NAMESPACES), "unshare")
        os.write(ours[1], b"x")
        os.read(theirs[0], 1)
        os._exit(_first(root, command, binds or {}))
    os.read(ours[0], 1)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(_ALL_USERS)
    os.write(theirs[1], b"x")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _first(root: Path, command: list[str], binds: dict[Path, str]) -> int:  # noqa: RET503  execve does not return
    """Start the first process of the new namespaces, with which all others end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("proc", "/proc", "proc")
    _mount("binfmt_misc", "/proc/sys/fs/binfmt_misc", "binfmt_misc")
    Path("/proc/sys/fs/binfmt_misc/register").write_text(_PROGRAMS % EMULATOR)
    _checked(_libc.sethostname(_HOST, len(_HOST)), "sethostname")
    for name in ("dev", "sys"):  # torch reads the processors in /sys, and says on stderr what is missing there
        _mount(f"/{name}", root / name, None, _BIND | _RECURSIVE)
    _mount("proc", root / "proc", "proc")
    _mount("tmpfs", root / "run", "tmpfs")
    for source, place in binds.items():
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        _mount(str(source), root / place.lstrip("/"), None, _BIND | _RECURSIVE)
    os.chroot(root)
    os.chdir("/")
    os.execve(command[0], command, ENVIRONMENT)  # noqa: S606  no shell is the point


if __name__ == "__main__":
    sys.exit(enter(Path(sys.argv[1]).resolve(), sys.argv[2:]))
