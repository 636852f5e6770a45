"""Start the injector, pass it one job and read its answer."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from hookd import errors
from hookd.errors import AttachError
from hookd.tool.linux.accounts import account_of
from hookd.tool.linux.waiter import BOOTSTRAP, WAITERS, python_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.inject.injector import Failed, Job, Stopped

_START = BOOTSTRAP + "from hookd.tool.inject.injector import main\nmain()\n"
_MARGIN_S = 5.0
MOST, WIDTH = 6, 3
"""Injectors of this process at a time: in all, and for the targets of one user. Each may stop a target, and during the stop it has
priority over all normal processes. Injectors that hang on one user's targets do not use up the slots of other users. Attaches by
rule leave slots for attaches that a person has requested, see `daemon.attach_scheduler`."""
WAIT_S = 60.0
"""How long an attach waits for a slot: several times the duration of the attaches before it."""


class Slots:
    """Limits the number of injectors. Thread-safe."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, user: int) -> Iterator[None]:
        """Wait for a slot for a target of a user, and occupy it in this context.

        Raises:
            AttachError: reason "busy", there was no slot in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._running.total() < MOST and self._running[user] < WIDTH, WAIT_S):
                raise AttachError(
                    f"timed out waiting for {self._running.total()} other attaches, {self._running[user]} of them to "
                    "processes of this user",
                    reason="busy", hint="Try again in a minute.",
                )  # fmt: skip
            self._running[user] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[user] -= 1
                self._changed.notify_all()


_SLOTS = Slots()


def run(job: Job) -> Stopped:
    """Start an injector, pass it the job and return its answer.

    It inherits only the job's descriptor.

    Raises:
        HookdError: the error that the injector reports.
        OSError: EPERM or ENOSYS from ptrace.
    """
    user = account_of(job.pid)
    WAITERS.require_few(user)
    with _SLOTS.of(user):
        text, code = _answer(job, user)
    try:
        answer = json.loads(text)
    except ValueError:
        hint = f"Report it, with the output of `hookd doctor {job.pid} --json`."
        raise AttachError(
            f"the injector for process {job.pid} exited with status {code}", reason="internal", hint=hint
        ) from None
    if "error" in answer:
        raise _error(answer["error"])
    return cast("Stopped", answer)


def _answer(job: Job, user: int) -> tuple[bytes, int]:
    """Run an injector to its end; return its output and exit status."""
    process = subprocess.Popen(
        python_command(_START),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env={},
        start_new_session=True, pass_fds=(job.memory,),
    )  # fmt: skip
    with process.stdin, process.stdout:  # type: ignore[union-attr]
        try:
            text, _ = process.communicate(json.dumps(asdict(job)).encode(), job.timeout_s + _MARGIN_S)
        except BaseException as error:
            if process.returncode is None:
                WAITERS.leave(user, process.pid)  # if it waits for the target's memory it cannot be killed
                process.returncode = -signal.SIGKILL
            if isinstance(error, subprocess.TimeoutExpired):
                raise AttachError(f"the injector for process {job.pid} timed out", reason="internal") from None
            raise
    return text, process.returncode


def _error(report: Failed) -> Exception:
    if report["kind"] == "OSError":
        return OSError(report["errno"], report["message"])
    return errors.rebuild(report["kind"], report["message"], report["reason"], report["hint"], AttachError)
