"""Scheduling of attaches by rule: a few at a time, round-robin over users, failing programs less often. No I/O.

A user's attempts delay only that user. Within a user, untried programs come first; within a program, the newest process
alternates with the one that has waited longest. So neither processes that never answer nor a stream of new ones starve
the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.tool.inject import helper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.tool.config.rules import Rule

MOST = helper.MOST - 2
"""Maximum concurrent attempts; leaves injectors free for attaches that a user asks for."""
WIDTH = helper.WIDTH - 1
"""Maximum per user; one for a user whose last attempt failed."""
USER_PAUSE_S = 1.0
"""Pause after a failure before the user's next attempt on any program, because programs are cheap to copy."""
LONGEST_PROGRAM_PAUSE_S = 10.0
"""Upper limit of the pause per program, which starts at 1 s and doubles with each consecutive failure. It is shorter than
the back-off of a process, because a working job may run the same program, such as `python3`."""
FORGET_S = 600.0


@dataclass
class PendingAttach:
    """A process that a rule selects.

    Attributes:
        start: start time in clock ticks since boot; identifies the process together with the pid.
        uid: the user to whom its attempts are accounted.
        program: device and inode of its executable.
        at: monotonic time of the next attempt, in seconds.
        is_tried: whether an attempt is in progress.
        failures: number of failed attempts in this process.
        why: reason and message of the last failure.
    """

    pid: int
    start: int
    uid: int
    program: tuple[str, int]
    rule: Rule
    at: float
    is_tried: bool = False
    failures: int = 0
    why: tuple[str, str] = ("", "")


@dataclass
class _Pace:
    """Rate of attempts for one user, or one program of a user.

    Attributes:
        attempts: attempts started so far.
        failures: consecutive failures.
        at: earliest time of the next attempt.
        last_number: global sequence number of the last attempt.
    """

    running: int = 0
    attempts: int = 0
    failures: int = 0
    at: float = 0.0
    last_number: int = 0

    def begin(self, number: int) -> None:
        self.running += 1
        self.attempts += 1
        self.last_number = number

    def fail(self, now: float, pause_s: float) -> None:
        self.failures += 1
        self.at = now + pause_s

    def succeed(self) -> None:
        self.failures, self.at = 0, 0.0

    def is_forgettable(self, now: float) -> bool:
        return not self.running and now > self.at + FORGET_S


@dataclass
class AttachScheduler:
    """Attempts in progress and outcomes of recent ones. Not thread-safe: the caller must lock."""

    _users: dict[int, _Pace] = field(default_factory=dict)
    _programs: dict[tuple[int, tuple[str, int]], _Pace] = field(default_factory=dict)
    _running: int = 0
    _number: int = 0

    def take(self, pending: Iterable[PendingAttach], now: float) -> PendingAttach | None:
        """Return the next process and count its attempt as started; None if none may start now."""
        if self._running >= MOST:
            return None
        due = [
            attach for attach in pending if attach.at <= now and not attach.is_tried and self._may_begin(attach, now)
        ]
        if not due:
            return None
        uid = min({attach.uid for attach in due}, key=lambda uid: self._user(uid).last_number)
        due = [attach for attach in due if attach.uid == uid]
        program = min({attach.program for attach in due}, key=lambda program: self._program(uid, program).last_number)
        due = [attach for attach in due if attach.program == program]
        user, pace = self._user(uid), self._program(uid, program)
        longest, newest = (
            min(due, key=lambda attach: attach.at),
            max(due, key=lambda attach: (-attach.failures, attach.start)),
        )
        attach = newest if pace.attempts % 2 == 0 else longest
        attach.is_tried = True
        self._running += 1
        self._number += 1
        user.begin(self._number)
        pace.begin(self._number)
        return attach

    def end(self, attach: PendingAttach, now: float, *, is_attached: bool | None) -> None:
        """Count an attempt as ended; `is_attached=None` leaves the failure counts unchanged."""
        user, pace = self._user(attach.uid), self._program(attach.uid, attach.program)
        attach.is_tried = False
        self._running -= 1
        user.running -= 1
        pace.running -= 1
        if is_attached:
            user.succeed()
            pace.succeed()
        elif is_attached is not None:
            user.fail(now, USER_PAUSE_S)
            pace.fail(now, min(2.0 ** min(pace.failures, 10), LONGEST_PROGRAM_PAUSE_S))

    def forget(self, now: float) -> None:
        """Forget users and programs that have not failed for a while."""
        self._users = {uid: pace for uid, pace in self._users.items() if not pace.is_forgettable(now)}
        self._programs = {key: pace for key, pace in self._programs.items() if not pace.is_forgettable(now)}

    def _may_begin(self, attach: PendingAttach, now: float) -> bool:
        user = self._user(attach.uid)
        width = 1 if user.failures else WIDTH
        return user.running < width and user.at <= now and self._program(attach.uid, attach.program).at <= now

    def _user(self, uid: int) -> _Pace:
        return self._users.setdefault(uid, _Pace())

    def _program(self, uid: int, program: tuple[str, int]) -> _Pace:
        return self._programs.setdefault((uid, program), _Pace())
