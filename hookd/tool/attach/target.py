"""Inspect a process before an attach: check every reason not to attach that is visible from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.errors import AttachError, NoSuchTarget, TargetUnsupported
from hookd.tool.attach import discover
from hookd.tool.inject import foundation, interpreter
from hookd.tool.linux import headroom, permission, proc
from hookd.tool.linux.memory import Opened

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PATIENCE_S = 0.2
"""A longer stop is not that of another attach, which takes milliseconds even on a busy machine."""


@dataclass(frozen=True)
class Target:
    """A process that may be attached to.

    Use it as a context manager, which closes its memory.

    Attributes:
        program: see `proc.program`.
        memory: of the inspected program.
    """

    status: proc.Status
    ticks: int
    program: str
    memory: Opened
    python: interpreter.Interpreter

    @property
    def pid(self) -> int:
        """Its pid, as we see it."""
        return self.status.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()


def inspect(pid: int, *, is_forced: bool = False) -> Target:
    """Check that process `pid` can be attached to, without stopping it.

    Args:
        pid: of the process.
        is_forced: whether to skip the checks of its resources, see `headroom`, and of its remote debugging table.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionDenied: access is denied; the reason says why.
        AttachError: reasons "zombie", "stopped", "traced", "died", and those of `headroom.require`.
        TargetUnsupported: reasons "disabled", "not-python", "python-version", "free-threaded", "no-torch", "32-bit",
            "architecture", "main-thread-exited".
    """
    status, ticks = require_awake(pid), proc.start_ticks(pid)
    permission.require_owner(status)
    try:
        program = proc.program(pid)
        memory = Opened(pid, program)
        try:
            python = _find_python(memory, is_forced=is_forced)
            proc.require_program(pid, program)  # so everything that was read by pid is of this program, too
        except BaseException:
            memory.close()
            raise
    except OSError as exc:
        raise permission.explain(pid, exc) from exc
    return Target(status, ticks, program, memory, python)


def _find_python(memory: Opened, *, is_forced: bool) -> interpreter.Interpreter:
    pid = memory.pid
    if discover.is_disabled(pid):
        hint = "HOOKD_DISABLE is set in its environment: whoever started it does not want hookd there."
        raise TargetUnsupported(f"process {pid} has hookd disabled", reason="disabled", hint=hint)
    maps = memory.mappings()
    python = interpreter.find(memory, maps)
    foundation.require(memory, python, is_forced=is_forced)
    if not discover.has_torch(maps):
        hint = "It may be a launcher (--tree attaches to its ranks), or import torch later. `hookd ps` lists training processes."
        raise TargetUnsupported(f"process {pid} has no torch loaded", reason="no-torch", hint=hint)
    if not is_forced:
        headroom.require(pid, maps)
    return python


def require_awake(pid: int) -> proc.Status:
    """Check that the process exists and is not stopped or traced.

    A stop or trace of up to `_PATIENCE_S` is ignored: it may be an attach of another tool.

    Raises:
        NoSuchTarget: there is no such process.
        PermissionDenied: reason "hidden".
        AttachError: reasons "zombie", "stopped", "traced".
        TargetUnsupported: reason "main-thread-exited".
    """
    try:
        status = _await_running(pid)
    except NoSuchTarget:
        permission.require_shown(pid)
        raise
    if status.state in "ZX" and status.threads > 1:
        hint = "hookd enters by the main thread; start such a program with `hookd run -- ...`."
        message = f"the main thread of process {pid} has exited, {status.threads - 1} others live on"
        raise TargetUnsupported(message, reason="main-thread-exited", hint=hint)
    if status.state in "ZX":
        hint = f"Process {status.ppid}, its parent, has not waited for it."
        raise AttachError(f"process {pid} has ended", reason="zombie", hint=hint)
    if status.tracer:
        raise permission.traced(status)
    if status.state in "Tt":
        hint = f"Continue it with `kill -CONT {pid}`, then try again."
        raise AttachError(f"process {pid} is stopped", reason="stopped", hint=hint)
    return status


def _await_running(pid: int) -> proc.Status:
    """Return the status of a process once it is not stopped or traced, or after _PATIENCE_S."""
    until = time.monotonic() + _PATIENCE_S
    while ((status := proc.status(pid)).tracer or status.state in "Tt") and time.monotonic() < until:
        time.sleep(0.005)
    return status
