"""Explain why the kernel denies access to a process, and how to get it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from hookd.errors import AttachError, HookdError, NoSuchTarget, PermissionDenied
from hookd.tool.linux import proc

_CAP_DAC_OVERRIDE, _CAP_SYS_PTRACE = 1 << 1, 1 << 19  # linux/capability.h
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def require_owner(status: proc.Status) -> None:
    """Check that we run as root or as the user of the process.

    Raises:
        PermissionDenied: reason "other-user".
    """
    if os.geteuid() not in (0, status.uid):
        raise PermissionDenied(
            f"process {status.pid} belongs to user {status.uid}, hookd runs as user {os.geteuid()}",
            reason="other-user",
            hint="Run hookd as that user or as root.",
        )


def require_shown(pid: int) -> None:
    """Check that /proc does not hide the process from us; return if it does not exist.

    Raises:
        PermissionDenied: reason "hidden".
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    except PermissionError as exc:
        hint = "/proc is mounted with hidepid; run hookd as the process's user or as root."
        raise PermissionDenied(f"process {pid} is hidden from user {os.geteuid()}", reason="hidden", hint=hint) from exc


def explain(pid: int, error: OSError) -> HookdError:
    """Convert an error of the kernel into one that names the cause, as far as it is visible from outside."""
    try:
        status = proc.status(pid)
    except NoSuchTarget as exc:
        return exc if error.errno == errno.ENOENT else AttachError(f"process {pid} ended", reason="died")
    if error.errno in (errno.ESRCH, errno.EFAULT) or status.state in "ZX":
        return proc.lost(pid)
    if error.errno == errno.ENOSYS:
        return forbidden(error)
    if error.errno not in (errno.EPERM, errno.EACCES):
        return AttachError(f"cannot read process {pid}: {error}", reason="unreadable")
    if status.tracer:
        return traced(status)
    return _denied(status, error)


def forbidden(error: OSError) -> PermissionDenied:
    """Return the error for a missing system call: only a seccomp filter takes ptrace away."""
    return PermissionDenied(
        f"ptrace is forbidden here by a seccomp filter: {error}",
        reason="seccomp",
        hint="Allow ptrace in the container's seccomp profile, or attach from the host.",
    )


def traced(status: proc.Status) -> AttachError:
    """Return the error for a process that another process traces."""
    name = ""
    with contextlib.suppress(HookdError, OSError, LookupError, ValueError):
        name = f" ({proc.status(status.tracer).name})"
    return AttachError(
        f"process {status.pid} is traced by process {status.tracer}{name}",
        reason="traced",
        hint=f"End the debugger or strace with pid {status.tracer}, then try again.",
    )


def _denied(status: proc.Status, error: OSError) -> PermissionDenied:
    if _has_capability():
        hint = (
            "A security module, a container's profile or another user namespace is in the way; attach from the "
            "host as root, or start the training with `hookd run -- ...`."
        )
        # The /proc files of another user's process belong to that user, with mode 0400, and so does its socket, with 0600.
        if error.errno == errno.EACCES and not _has_capability(_CAP_DAC_OVERRIDE):
            hint = "hookd has CAP_SYS_PTRACE but not CAP_DAC_OVERRIDE; in a container, add the capability DAC_OVERRIDE."
        message = f"the kernel refuses ptrace on process {status.pid}: {error}"
        return PermissionDenied(message, reason="ptrace-refused", hint=hint)
    with contextlib.suppress(HookdError):
        require_owner(status)
        return _denied_to_owner(status, error)
    return PermissionDenied(
        f"process {status.pid} belongs to user {status.uid}, hookd runs as user {os.geteuid()}",
        reason="other-user",
        hint="Run hookd as that user or as root.",
    )


def _denied_to_owner(status: proc.Status, error: OSError) -> PermissionDenied:
    scope = _yama()
    if scope:
        hint = {
            1: "Run hookd as root, or set kernel.yama.ptrace_scope to 0 (sysctl).",
            2: "Run hookd as root: kernel.yama.ptrace_scope is 2.",
        }.get(scope, "Start the training with `hookd run -- ...`: kernel.yama.ptrace_scope is 3 until the next boot.")
        return PermissionDenied(f"Yama forbids ptrace on process {status.pid}", reason="yama", hint=hint)
    if not _is_dumpable(status):
        return PermissionDenied(
            f"process {status.pid} is not dumpable (a set-user-ID program, or prctl(PR_SET_DUMPABLE, 0))",
            reason="not-dumpable",
            hint="Run hookd as root.",
        )
    return PermissionDenied(
        f"the kernel refuses ptrace on process {status.pid}: {error}", reason="ptrace-refused",
        hint="Run hookd as root or with CAP_SYS_PTRACE; in a container, add the capability SYS_PTRACE.",
    )  # fmt: skip


def _has_capability(which: int = _CAP_SYS_PTRACE) -> bool:
    for line in proc.read(os.getpid(), "status").decode().split("\n"):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & which)
    return False


def _yama() -> int:
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return 0


def _is_dumpable(status: proc.Status) -> bool:
    """Whether a process is dumpable: if it is not, root owns its /proc files."""
    try:
        return Path(f"/proc/{status.pid}/environ").stat().st_uid == status.uid
    except OSError:
        return True
