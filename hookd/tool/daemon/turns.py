"""Which process to attach to by rule next: a few at a time, users in turn, those of failing programs seldom. No I/O.

A user's attempts delay that user alone. Of one user's processes those that nothing is known of come first, the newest and
the one that has waited longest in turn: neither many processes that never answer nor ever new ones keep the rest waiting
for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookd.tool.inject import helper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.tool.config.rules import Rule

MOST = helper.MOST - 2
"""Attempts at a time: an attach that somebody asks for finds an injector that no rule has taken."""
WIDTH = helper.WIDTH - 1
"""Of these for one user; for one whose last attempt has failed, a single one."""
USER_PAUSE_S = 1.0
"""Between a failure and the user's next attempt, whichever program it is about: programs are cheap to copy."""
LONGEST_PROGRAM_PAUSE_S = 10.0
"""The pause of a program begins with a second and doubles with each failure in a row. It is short of the back-off of a
process, because a job that works may run the same program: `python3` is one."""
FORGET_S = 600.0


@dataclass
class Want:
    """One process that a rule wants.

    Attributes:
        start: in clock ticks after boot; with the pid it names the process.
        uid: the user who answers for it.
        program: device and inode of its executable.
        at: when to try next, by the monotonic clock.
        is_tried: while an attempt is under way.
        failures: of attempts in this process.
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
    """How often one user, or one program of a user, is attempted.

    Attributes:
        attempts: begun so far.
        failures: in a row.
        at: no attempt before this time.
        turn: number of the last attempt among all.
    """

    running: int = 0
    attempts: int = 0
    failures: int = 0
    at: float = 0.0
    turn: int = 0

    def begin(self, number: int) -> None:
        self.running += 1
        self.attempts += 1
        self.turn = number

    def fail(self, now: float, pause_s: float) -> None:
        self.failures += 1
        self.at = now + pause_s

    def succeed(self) -> None:
        self.failures, self.at = 0, 0.0

    def is_forgettable(self, now: float) -> bool:
        return not self.running and now > self.at + FORGET_S


@dataclass
class Turns:
    """Attempts under way and what came of the last ones. The caller sees to it that one thread at a time is here."""

    _users: dict[int, _Pace] = field(default_factory=dict)
    _programs: dict[tuple[int, tuple[str, int]], _Pace] = field(default_factory=dict)
    _running: int = 0
    _number: int = 0

    def take(self, wants: Iterable[Want], now: float) -> Want | None:
        """Return the process whose turn it is and count its attempt as begun, None if none may begin now."""
        if self._running >= MOST:
            return None
        due = [want for want in wants if want.at <= now and not want.is_tried and self._may_begin(want, now)]
        if not due:
            return None
        uid = min({want.uid for want in due}, key=lambda uid: self._user(uid).turn)
        due = [want for want in due if want.uid == uid]
        program = min({want.program for want in due}, key=lambda program: self._program(uid, program).turn)
        due = [want for want in due if want.program == program]
        user, pace = self._user(uid), self._program(uid, program)
        longest, newest = min(due, key=lambda want: want.at), max(due, key=lambda want: (-want.failures, want.start))
        want = newest if pace.attempts % 2 == 0 else longest
        want.is_tried = True
        self._running += 1
        self._number += 1
        user.begin(self._number)
        pace.begin(self._number)
        return want

    def end(self, want: Want, now: float, *, is_attached: bool | None) -> None:
        """Count an attempt as ended; None: it says nothing of the next one."""
        user, pace = self._user(want.uid), self._program(want.uid, want.program)
        want.is_tried = False
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

    def _may_begin(self, want: Want, now: float) -> bool:
        user = self._user(want.uid)
        width = 1 if user.failures else WIDTH
        return user.running < width and user.at <= now and self._program(want.uid, want.program).at <= now

    def _user(self, uid: int) -> _Pace:
        return self._users.setdefault(uid, _Pace())

    def _program(self, uid: int, program: tuple[str, int]) -> _Pace:
        return self._programs.setdefault((uid, program), _Pace())
