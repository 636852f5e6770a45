"""The processes that the rules want attached to: which, by what rule, and when to try (again). Blocking on /proc."""

from __future__ import annotations

import contextlib
import logging
import pwd
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookd.attach import discover, proc
from hookd.attach.launch import is_launched
from hookd.config.rules import Traits, decide
from hookd.errors import HookdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.attach.discover import Candidate
    from hookd.config.rules import Rule

SETTLE_S = 1.0
"""A process younger than this may have been forked a moment ago, and not have said yet that it is a worker."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 3600.0
NEVER_AGAIN = ("data-worker", "disabled")
"""Refusals of the target's own: there is nothing to try again."""
GONE = ("died", "zombie", "no-such-process", "not-attached")
_log = logging.getLogger(__name__)


@dataclass
class Want:
    """One process that a rule wants.

    Attributes:
        at: when to try next, by the monotonic clock; infinite while a try is under way.
        failures: so many tries have failed.
        why: reason and message of the last failure.
    """

    pid: int
    start: int
    rule: Rule
    at: float
    failures: int = 0
    why: tuple[str, str] = ("", "")


class Wanted:
    """Which processes to attach to, and when. Usable from several threads.

    Args:
        rules: of the configuration.
        is_dismissed: tells by pid and start time of a process that a person has detached from.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        is_dismissed: Callable[[int, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._is_dismissed = is_dismissed
        self._clock = clock
        self._lock = threading.Lock()
        self._wants: dict[int, Want] = {}

    def see(self, found: Iterable[Candidate]) -> None:
        """Ask the rules about processes that are new or have changed."""
        for one in found:
            with self._lock:
                known = self._wants.get(one.pid)
                if known is not None and known.start == one.start and one.state == "attachable":
                    continue
                self._wants.pop(one.pid, None)
            if one.state == "attachable" and not self._is_dismissed(one.pid, one.start):
                self._consider(one)

    def _consider(self, one: Candidate) -> None:
        try:
            seen = traits(one)
        except (HookdError, OSError):  # it has ended, or may not be seen
            return
        rule = decide(self._rules, seen)
        if rule is not None and not is_launched(seen.environment):  # `hookd run` has its own way in
            with self._lock:
                self._wants[one.pid] = Want(one.pid, one.start, rule, self._clock() + self._settling(one))

    @staticmethod
    def _settling(one: Candidate) -> float:
        return SETTLE_S if discover.age_s(one.start) < SETTLE_S else 0.0

    def due(self) -> list[Want]:
        """Give those to be tried now, having looked at them once more. `failed` or `done` must follow for each."""
        now = self._clock()
        with self._lock:
            asked = [want for want in self._wants.values() if want.at <= now]
            for want in asked:
                want.at = float("inf")
        return [want for want in asked if self._is_wanted(want)]

    def _is_wanted(self, want: Want) -> bool:
        found = discover.inspect(want.pid)
        is_there = found is not None and found.start == want.start and found.state == "attachable"
        if is_there and not self._is_dismissed(want.pid, want.start):
            return True
        self.done(want)
        return False

    def done(self, want: Want) -> None:
        """Ask no more for this process: it is attached, has ended, or is none that trains."""
        with self._lock:
            if self._wants.get(want.pid) is want:
                del self._wants[want.pid]

    def failed(self, want: Want, error: HookdError) -> None:
        """Wait after a failed try, twice as long each time."""
        if error.reason in NEVER_AGAIN:
            return  # it stays known, and so is not considered again
        if error.reason in GONE:
            self.done(want)
            return
        wait_s = min(FIRST_WAIT_S * 2**want.failures, LONGEST_WAIT_S)
        with self._lock:
            want.failures += 1
            want.why, want.at = (error.reason, error.message), self._clock() + wait_s
        _log.warning("process %d: attach by rule failed: %s; again in %g s", want.pid, error.message, wait_s)

    def reset(self, pid: int) -> None:
        """Forget the failures in a process: a person attaches to it."""
        with self._lock:
            if (want := self._wants.get(pid)) is not None:
                want.failures, want.why, want.at = 0, ("", ""), self._clock() + FIRST_WAIT_S

    def prune(self) -> None:
        """Forget the processes that have ended."""
        with self._lock:
            wants = list(self._wants.values())
        for want in wants:
            if not _lives(want):
                self.done(want)

    def backing_off(self) -> list[dict[str, Any]]:
        """Describe the processes in which attach has failed and will be tried again."""
        now = self._clock()
        with self._lock:
            wants = [want for want in self._wants.values() if want.failures]
        return [
            {
                "pid": want.pid,
                "failures": want.failures,
                "reason": want.why[0],
                "error": want.why[1],
                "again_in_s": round(max(0.0, want.at - now), 1) if want.at < float("inf") else 0.0,
            }
            for want in wants
        ]


def traits(one: Candidate) -> Traits:
    """Read what the rules look at.

    Raises:
        HookdError: it has ended.
        OSError: it may not be seen.
    """
    user = {str(one.uid)}
    with contextlib.suppress(KeyError):  # a container's
        user.add(pwd.getpwuid(one.uid).pw_name)
    return Traits(" ".join(one.cmdline), frozenset(user), _cgroup(one.pid), proc.environ(one.pid))


def _cgroup(pid: int) -> str:
    """Give the path below the unified hierarchy (the line `0::PATH`), or below the first one of a version 1 system."""
    lines = proc.read(pid, "cgroup").decode("utf-8", "replace").splitlines()
    paths = {line.split(":", 2)[0]: line.split(":", 2)[2] for line in lines if line.count(":") >= 2}
    unified = paths.pop("0", "")
    return unified if unified not in ("", "/") or not paths else next(iter(paths.values()))


def _lives(want: Want) -> bool:
    try:
        return proc.start_ticks(want.pid) == want.start
    except (HookdError, OSError, LookupError, ValueError):
        return False
