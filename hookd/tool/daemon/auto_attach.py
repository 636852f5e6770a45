"""Processes to attach to by rule: which ones, by which rule, and when to try or retry. Blocks on /proc."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.attach import discover, environment
from hookd.tool.attach.census import INSPECTION_S, inspected
from hookd.tool.attach.launch import is_launched
from hookd.tool.config.rules import Traits, decide
from hookd.tool.daemon.attach_scheduler import AttachScheduler, PendingAttach
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import account
from hookd.tool.linux.owner import user_name
from hookd.tool.linux.waiter import WAITERS
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.config.rules import Rule
    from hookd.wire.target import BackingOff

SETTLE_S = 1.0
"""A process younger than this may be a data loader worker that was just forked and is not recognizable yet."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 3600.0
NEVER_AGAIN = ("data-worker", "disabled")
"""Refusals by the target itself; these are final."""
GONE = ("died", "zombie", "no-such-process", "not-attached")
_log = logging.getLogger(__name__)


class AutoAttach:
    """Schedule of attaches by rule. Thread-safe.

    Args:
        is_dismissed: whether a user has detached from the process with this pid and start time.
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
        self._pending: dict[int, PendingAttach] = {}
        self._unknown: dict[int, int] = {}
        self._scheduler = AttachScheduler()

    def see(self, candidates: Iterable[Candidate]) -> None:
        """Apply the rules to processes that are new or have changed."""
        for candidate in candidates:
            with self._lock:
                known = self._pending.get(candidate.pid)
                if known is not None and known.start == candidate.start and candidate.state == "attachable":
                    continue
                self._pending.pop(candidate.pid, None)
            if candidate.state == "attachable" and not self._is_dismissed(candidate.pid, candidate.start):
                self._consider(candidate)

    def _consider(self, candidate: Candidate) -> None:
        try:
            with WAITERS.within(INSPECTION_S):
                seen, program = traits(candidate), proc.executable(candidate.pid)
        except (HookdError, OSError):  # it has ended, or is not readable
            return
        if seen is None:
            self._leave_alone(candidate)
            return
        rule = decide(self._rules, seen)
        if rule is not None and not is_launched(seen.environment):  # `hookd run` loads its agent itself
            at = self._clock() + (SETTLE_S if discover.age_s(candidate.start) < SETTLE_S else 0.0)
            attach = PendingAttach(candidate.pid, candidate.start, account(candidate.uid), program, rule, at)
            with self._lock:
                self._pending[candidate.pid] = attach

    def _leave_alone(self, candidate: Candidate) -> None:
        """Log once that no rule applies to a process because its environment is unreadable."""
        with self._lock:
            is_logged, self._unknown[candidate.pid] = (
                self._unknown.get(candidate.pid) == candidate.start,
                candidate.start,
            )
        if not is_logged:
            _log.warning(
                "process %d of user %s has overwritten its environment, which may have contained HOOKD_DISABLE: rules do not apply; "
                "`hookd attach %d` asks the process itself", candidate.pid, user_name(candidate.uid), candidate.pid,
            )  # fmt: skip

    def due(self) -> list[PendingAttach]:
        """Return the processes to try now, after checking each again. The caller must call `attached` or `failed` for each."""
        chosen = []
        while (attach := self._take()) is not None:
            if self._is_wanted(attach):
                chosen.append(attach)
            else:
                self._end(attach, is_attached=None)
                self._drop(attach)
        return chosen

    def _take(self) -> PendingAttach | None:
        with self._lock:
            return self._scheduler.take(self._pending.values(), self._clock())

    def _end(self, attach: PendingAttach, *, is_attached: bool | None) -> None:
        with self._lock:
            self._scheduler.end(attach, self._clock(), is_attached=is_attached)

    def _is_wanted(self, attach: PendingAttach) -> bool:
        candidate = inspected(attach.pid)
        is_there = candidate is not None and candidate.start == attach.start and candidate.state == "attachable"
        return is_there and not self._is_dismissed(attach.pid, attach.start)

    def _drop(self, attach: PendingAttach) -> None:
        with self._lock:
            if self._pending.get(attach.pid) is attach:
                del self._pending[attach.pid]

    def attached(self, attach: PendingAttach) -> None:
        """Remove a process from the schedule after a successful attach."""
        self._end(attach, is_attached=True)
        self._drop(attach)

    def failed(self, attach: PendingAttach, error: HookdError) -> None:
        """Schedule the next attempt after a failure; the wait doubles each time."""
        is_final = error.reason in NEVER_AGAIN
        self._end(attach, is_attached=None if is_final else False)
        if is_final:
            attach.at = float("inf")  # stays known, so the rules are not applied again
            return
        if error.reason in GONE:
            self._drop(attach)
            return
        wait_s = min(FIRST_WAIT_S * 2**attach.failures, LONGEST_WAIT_S)
        with self._lock:
            attach.failures += 1
            attach.why, attach.at = (error.reason, error.message), self._clock() + wait_s
        _log.warning(
            "process %d of user %s: attach by %s failed: %s; again in %g s",
            attach.pid, user_name(attach.uid), one_line(attach.rule.description), error.message, wait_s,
        )  # fmt: skip

    def reset(self, pid: int) -> None:
        """Reset the failures of a process, because a user attaches to it."""
        with self._lock:
            if (attach := self._pending.get(pid)) is not None:
                attach.failures, attach.why, attach.at = 0, ("", ""), self._clock() + FIRST_WAIT_S

    def prune(self) -> None:
        """Forget the processes that have ended."""
        with self._lock:
            pending, unknown = list(self._pending.values()), list(self._unknown.items())
            self._scheduler.forget(self._clock())
        for attach in pending:
            if not proc.is_same(attach.pid, attach.start):
                self._drop(attach)
        for pid, start in unknown:
            if not proc.is_same(pid, start):
                self._unknown.pop(pid, None)

    def backing_off(self) -> list[BackingOff]:
        """Return a row for each process whose attach failed and will be retried."""
        now = self._clock()
        with self._lock:
            pending = [attach for attach in self._pending.values() if attach.failures]
        return [
            {
                "pid": attach.pid,
                "failures": attach.failures,
                "reason": attach.why[0],
                "error": attach.why[1],
                "again_in_s": 0.0 if attach.is_tried else round(max(0.0, attach.at - now), 1),
            }
            for attach in pending
        ]


def traits(candidate: Candidate) -> Traits | None:
    """Return the traits that rules match on; None if the environment cannot be determined.

    Raises:
        HookdError: the process has ended.
        OSError: the process is not readable.
    """
    user = frozenset({str(candidate.uid), user_name(candidate.uid)})
    variables = environment.of(candidate.pid)
    return None if variables is None else Traits(" ".join(candidate.cmdline), user, _cgroup(candidate.pid), variables)


def _cgroup(pid: int) -> str:
    """Return the cgroup path in the unified hierarchy (the line `0::PATH`), or in the first hierarchy under cgroup v1."""
    lines = proc.read(pid, "cgroup").decode("utf-8", "replace").splitlines()
    paths = {line.split(":", 2)[0]: line.split(":", 2)[2] for line in lines if line.count(":") >= 2}
    unified = paths.pop("0", "")
    return unified if unified not in ("", "/") or not paths else next(iter(paths.values()))
