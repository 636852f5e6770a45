"""Two ways to get the injected code run in a target: a stop with ptrace, or CPython's remote debugging. Tool side."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from hookd.errors import HookdError
from hookd.tool.attach.target import require_awake
from hookd.tool.inject import helper, mailbox
from hookd.tool.inject.injector import Job

if TYPE_CHECKING:
    from hookd.tool.attach.target import Target
    from hookd.tool.inject.remote_debug import RemoteDebug, ScriptFolder

_STOP_TIMEOUT_S = 1.7
"""For a stop, to which `ptrace.GRACE_S` may come: less than 2 s in all."""
_FILTERED = 2  # `Seccomp:` in /proc/PID/status


class Delivery(ABC):
    """One request under way. The order of use is `queue`, `again` at most once, then `withdraw` or `finish`."""

    method: Literal["ptrace", "remote-debug"]
    box: mailbox.Box
    pause_s = 0.0

    @abstractmethod
    def queue(self) -> None:
        """Have the code run by the main thread as soon as it reaches the interpreter."""

    @abstractmethod
    def again(self) -> None:
        """Queue it once more, in case the first time was lost; the token makes that harmless."""

    def withdraw(self) -> None:
        """Make code that is still queued do nothing when it runs."""
        with contextlib.suppress(OSError):
            mailbox.set_word(self.box, mailbox.CANCELLED, 1)

    def finish(self) -> None:  # noqa: B027  most have nothing to close
        """Let go of what the tool holds."""


class StopDelivery(Delivery):
    """Through a stop of about 0.2 ms; the mailbox is memory of the target.

    Args:
        target: whom to stop.
        token: one-shot number.
        size: of the mailbox, in bytes.
        wait_s: how long the target's thread waits for the data.
    """

    method = "ptrace"

    def __init__(self, target: Target, token: int, size: int, wait_s: float) -> None:
        self._target, self._token, self._size = target, token, size
        self._code = mailbox.code(target.status.nspid, token, wait_s)
        self._address = 0

    def queue(self) -> None:
        """See `Delivery`."""
        self._address = self._stop(direct=False)
        memory = self._target.memory
        memory.require_private(self._address, self._size)  # where the mailbox lies is the target's word
        self.box = mailbox.MemoryBox(memory, self._address)

    def again(self) -> None:
        """See `Delivery`."""
        self._stop(direct=False)

    def run_on_blocked(self) -> None:
        """Run the code at once on the main thread, which has been proven to hang outside the interpreter.

        Raises:
            AttachError: reason "blocked", it holds the interpreter's lock or the call does not come back.
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
                require_awake(target.pid)  # which says by whom
            raise
        self.pause_s += answer["pause_s"]
        return int(answer["box"])


class ScriptDelivery(Delivery):
    """Through the fields of PEP 768, without any stop; the mailbox is a file.

    Args:
        target: whom to ask.
        remote: its remote debugging, enabled.
        folder: where it reads files.
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
        code = mailbox.file_code(target.status.nspid, token, wait_s, folder.path(".box"), folder.path(".py"))
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
            self.box, mailbox.CLAIMED
        ):  # else the script is gone, and its absence would be complained of
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
