"""Read a consistent snapshot of a process from outside. Read-only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.errors import AttachError, HookdError
from hookd.tool.attach import environment
from hookd.tool.linux import proc

if TYPE_CHECKING:
    from collections.abc import Mapping

TRIES = 20
PAUSE_S = 0.001
"""Pause between two tries: about the duration of an exec."""


@dataclass(frozen=True)
class Snapshot:
    """The data of /proc for a process, all of the same program.

    Attributes:
        pid: of the process.
        start_ticks: see `proc.start_ticks`.
        uid: the real user id.
        ppid: pid of the parent.
        cmdline: the command line; empty if it cannot be read.
        environ: the initial environment, or the one that the program has moved; empty if it cannot be read.
        network: the kernel's name of the network namespace; "" if it cannot be read.
    """

    pid: int
    start_ticks: int
    uid: int
    ppid: int
    cmdline: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    network: str = ""


def take(pid: int, *, settles: bool = True) -> Snapshot:
    """Return a snapshot of a process; read it again if the process became another program meanwhile.

    Between fork and exec a process shows its parent's program and environment, and during the exec an empty environment. In these
    cases the read is repeated as well, but only for TRIES times PAUSE_S: some processes never exec, or have no environment.

    Args:
        pid: of the process.
        settles: whether the process may be about to exec.

    Raises:
        NoSuchTarget: there is no such process.
        OSError: it cannot be read now.
    """
    for _ in range(TRIES):
        image = _image(pid)
        snapshot = _read(pid)
        is_whole = (snapshot.start_ticks, image) == (proc.start_ticks(pid), _image(pid))
        if is_whole and not (settles and image and (not snapshot.environ or image == _image(snapshot.ppid))):
            break
        time.sleep(PAUSE_S)
    return snapshot


def _read(pid: int) -> Snapshot:
    start_ticks, status = proc.start_ticks(pid), proc.status(pid)
    try:
        cmdline, environ = tuple(proc.words(pid, "cmdline")), environment.of(pid) or {}
    except (PermissionError, AttachError):  # access is denied, or its address space is locked
        cmdline, environ = (), {}
    return Snapshot(pid, start_ticks, status.uid, status.ppid, cmdline, environ, proc.link(pid, "ns/net"))


def _image(pid: int) -> str:
    """Return `proc.image`, which changes with each exec; "" if the process has none or access is denied."""
    try:
        return proc.image(pid)
    except (HookdError, OSError):
        return ""
