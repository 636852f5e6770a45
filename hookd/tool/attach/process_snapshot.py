"""One consistent look at a process from outside. Tool side; reads only."""

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
"""Between two tries: an exec takes about as long."""


@dataclass(frozen=True)
class Snapshot:
    """What /proc says of a process, all of it about the same program.

    Attributes:
        pid: of the process.
        start_ticks: see `proc.start_ticks`.
        uid: the real user id.
        ppid: pid of the parent.
        cmdline: the command line; empty where it cannot be read.
        environ: the environment that the program was started with, or that it has moved; likewise.
        network: the network namespace, as the kernel names it; likewise "".
    """

    pid: int
    start_ticks: int
    uid: int
    ppid: int
    cmdline: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    network: str = ""


def take(pid: int, *, settles: bool = True) -> Snapshot:
    """Read it, again where the process became another program meanwhile.

    Between fork and exec a process shows its parent's program and environment, and within the exec an empty one. Such a
    look is repeated too, for TRIES times PAUSE_S: some processes stay as they were forked, or have no environment.

    Args:
        pid: of the process.
        settles: whether the process may be about to exec.

    Raises:
        NoSuchTarget: there is no such process.
        OSError: it cannot be looked at now.
    """
    for _ in range(TRIES):
        image = _image(pid)
        found = _read(pid)
        is_whole = (found.start_ticks, image) == (proc.start_ticks(pid), _image(pid))
        if is_whole and not (settles and image and (not found.environ or image == _image(found.ppid))):
            break
        time.sleep(PAUSE_S)
    return found


def _read(pid: int) -> Snapshot:
    start_ticks, status = proc.start_ticks(pid), proc.status(pid)
    try:
        cmdline, environ = tuple(proc.words(pid, "cmdline")), environment.of(pid) or {}
    except (PermissionError, AttachError):  # not for us, or its address space is locked
        cmdline, environ = (), {}
    return Snapshot(pid, start_ticks, status.uid, status.ppid, cmdline, environ, proc.link(pid, "ns/net"))


def _image(pid: int) -> str:
    """Return what tells one program from the next (`proc.image`), "" where there is none or we may not see it."""
    try:
        return proc.image(pid)
    except (HookdError, OSError):
        return ""
