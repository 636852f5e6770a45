"""Run the injected code in a target, by a stop with ptrace or by CPython's remote debugging."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from hookd.errors import HookdError
from hookd.tool.attach.target import require_awake
from hookd.tool.inject import helper, mailbox, queued_source
from hookd.tool.inject.injector import Job

if TYPE_CHECKING:
    from hookd.tool.attach.target import Target
    from hookd.tool.inject.remote_debug import RemoteDebug, ScriptFolder

_STOP_TIMEOUT_S = 1.7
"""Timeout of a stop; with `ptrace.GRACE_S` less than 2 s in all."""
_FILTERED = 2  # `Seccomp:` in /proc/PID/status


class Delivery(ABC):
    """One request in progress.

    The order of use is `queue`, `again` at most once, then `withdraw` or `finish`.
    """

    method: Literal["ptrace", "remote-debug"]
    box: mailbox.Box
    pause_s = 0.0

    @abstractmethod
    def queue(self) -> None:
        """Queue the code, so that the main thread runs it as soon as it reaches the interpreter."""

    @abstractmethod
    def again(self) -> None:
        """Queue the code again, in case the first time was lost.

        The token makes a second run harmless.
        """

    def withdraw(self) -> None:
        """Cancel code that is still queued: when it runs, it does nothing."""
        with contextlib.suppress(OSError):
            mailbox.set_word(self.box, mailbox.CANCELLED, 1)

    def finish(self) -> None:  # noqa: B027  most have nothing to close
        """Release the tool's resources."""


class StopDelivery(Delivery):
    """Delivery by a stop of about 0.4 ms.

    The mailbox is in the target's memory.

    Args:
        target: to stop.
        token: one-time number.
        size: of the mailbox, in bytes.
        wait_s: how long the target's thread waits for the data.
    """

    method = "ptrace"

    def __init__(self, target: Target, token: int, size: int, wait_s: float) -> None:
        self._target, self._token, self._size = target, token, size
        self._code = queued_source.code(target.status.nspid, token, wait_s)
        self._address = 0

    def queue(self) -> None:
        """See `Delivery`."""
        self._address = self._stop(direct=False)
        memory = self._target.memory
        memory.require_private(self._address, self._size)  # the target controls the mailbox's address
        self.box = mailbox.MemoryBox(memory, self._address)

    def again(self) -> None:
        """See `Delivery`."""
        self._stop(direct=False)

    def run_on_blocked(self) -> None:
        """Run the code at once on the main thread, which is known to hang outside the interpreter.

        Raises:
            AttachError: reason "blocked", the thread holds the GIL or the call does not return.
        """
        self._stop(direct=True)

    def _stop(self, *, direct: bool) -> int:
        target = self._target
        job = Job(
            pid=target.pid,
            ticks=target.ticks,
            program=target.program,
            memory=target.memory.fd,
            symbols=target.python.symbols,
            returns=target.python.returns,
            code=self._code,
            token=self._token,
            size=self._size,
            timeout_s=_STOP_TIMEOUT_S,
            box=self._address,
            is_filtered=target.status.seccomp == _FILTERED,
            direct=direct,
        )
        try:
            answer = helper.run(job)
        except HookdError as exc:
            if exc.reason in ("traced", "stopped"):
                require_awake(target.pid)  # its error names the tracer
            raise
        self.pause_s += answer["pause_s"]
        return int(answer["box"])


class ScriptDelivery(Delivery):
    """Delivery by remote debugging (PEP 768), without a stop.

    The mailbox is a file.

    Args:
        target: to run the script.
        remote: its remote debugging, which is enabled.
        folder: for the files.
        token, size, wait_s: as in `StopDelivery`.
    """

    method = "remote-debug"

    def __init__(
        self, target: Target, remote: RemoteDebug, folder: ScriptFolder, *, token: int, size: int, wait_s: float
    ) -> None:
        self._remote, self._folder = remote, folder
        self._box = mailbox.FileBox(folder.create(".box"))
        self.box = self._box
        self._box.write(0, mailbox.opening(token, size))
        self._box.write(size - 1, b"\0")
        code = queued_source.file_code(target.status.nspid, token, wait_s, folder.path(".box"), folder.path(".py"))
        script = mailbox.FileBox(folder.create(".py"))
        script.write(0, code.encode())
        script.close()
        folder.hand_over()

    def queue(self) -> None:
        """See `Delivery`."""
        self._remote.run_script(self._folder.path(".py"))

    def again(self) -> None:
        """See `Delivery`."""
        if not mailbox.word(
            self.box, mailbox.STATE
        ):  # otherwise the script is already removed, and the target would print an error
            self._remote.run_script(self._folder.path(".py"))

    def withdraw(self) -> None:
        """See `Delivery`."""
        with contextlib.suppress(OSError):
            self._remote.cancel()
        super().withdraw()

    def finish(self) -> None:
        """See `Delivery`."""
        self._folder.remove()
        self._box.close()
