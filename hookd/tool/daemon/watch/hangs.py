"""Detect hangs: a rank without events for too long, and which ranks of its run wait for which.

See docs/hangs.md. Everything is read from pages and /proc, so the target need not cooperate: its main thread may be in native
code, hold the GIL, or be stopped. One hang per run is reported at a time, on a rank that the others wait for.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.fleet.targets import GONE
from hookd.tool.daemon.watch.silence import Patience, Silence
from hookd.tool.daemon.watch.verdict import RankPosition, judge, sentence
from hookd.tool.daemon.watch.watcher import Declared, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.watch.verdict import Verdict

HANG, OVER = "hang", "hang_over"
"""The kinds of its incidents."""
LONGEST_GAP_S = 5.0
"""Maximum time that counts between two polls, unless two polling intervals are longer: the daemon may have been suspended."""
_HANG = Declared(
    "hookd_hang", "gauge", "1 while a rank hangs: role stands, it is waited for; role waits, it waits.", ("role",)
)
_PATIENCE = Declared(
    "hookd_hang_patience_seconds", "gauge", "How long the rank may be silent where it was silent last."
)
ROLES = ("stands", "waits")


@dataclasses.dataclass
class _Reported:
    """A hang that was reported.

    Attributes:
        for_s: its duration until now, in seconds.
        before_s: the part of `for_s` before this daemon started to watch.
        at_least: whether it may have lasted longer than `for_s`.
    """

    target: Target
    for_s: float = 0.0
    before_s: float = 0.0
    at_least: bool = False


class Hangs:
    """Watches for hangs, see `hookd.tool.daemon.watch.watcher.Watcher`.

    Args:
        poll_s: interval between two polls, in seconds.
    """

    families: Sequence[Declared] = (_HANG, _PATIENCE)

    def __init__(
        self,
        fleet: Fleet,
        patience: Patience | None = None,
        *,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._patience = patience or Patience()
        self._longest_gap_s = max(LONGEST_GAP_S, 2 * poll_s)
        self._clock = clock
        self._polled = clock()
        self._now = 0.0  # a clock that does not advance while the daemon is suspended
        self._silences: dict[Target, Silence] = {}
        self._reported: dict[Target, _Reported] = {}

    def poll(self, targets: Sequence[Target]) -> None:
        """Compare all pages with their previous state, and judge every run."""
        clock = self._clock()
        self._now += min(max(0.0, clock - self._polled), self._longest_gap_s)
        self._polled = clock
        runs: dict[str, list[Target]] = {}
        for target in targets:
            runs.setdefault(target.claim.run, []).append(target)
        for members in runs.values():
            self._see(members)
        for target in self._silences.keys() - set(targets):
            self._forget(target)

    def samples(self, target: Target) -> Iterable[Sample]:
        """Yield whether a living target hangs, and how long it may be silent."""
        silence, hang, snapshot = self._silences.get(target), target.hang, target.last()
        if silence is None or snapshot is None or target.ended is not None:
            return
        for role in ROLES:
            yield Sample(_HANG, {"role": role}, float(hang is not None and hang["role"] == role))
        yield Sample(_PATIENCE, {}, silence.patience_s(snapshot))

    def _see(self, members: Sequence[Target]) -> None:
        """Judge the ranks of one run, or follow its reported hang."""
        new = [target for target in members if target not in self._silences]
        for target in members:
            self._follow(target)
        reported = next((self._reported[target] for target in members if target in self._reported), None)
        if reported is None and new:
            reported = self._recall(new, members)
        if reported is None:
            self._judge(members)
        elif reported.target.hang is None:
            self._end(reported, members)
        else:
            self._update(reported, members)

    def _follow(self, target: Target) -> None:
        silence = self._silences.get(target)
        if silence is None:
            silence = self._silences[target] = Silence(self._now, self._patience)
        snapshot = target.last()
        was_reported = target.hang is not None
        if target.ended is not None or snapshot is None or silence.see(snapshot, self._now, was_reported=was_reported):
            target.hang = None

    def _judge(self, members: Sequence[Target]) -> None:
        """Report a hang if a rank of the run is silent for too long, unless it waits for a rank that is not silent."""
        if any(map(_is_leaving, members)):
            return  # its page no longer shows its progress, and without it the others would be blamed
        alive = self._judged(members)
        gone = [target for target in members if target.ended is not None and target.state in GONE]
        overdue = [target for target in alive if self._is_overdue(target, is_deserted=bool(gone))]
        if any(self._is_paused(target) for target in alive):
            for target in alive:
                self._silences[target].rearm(self._now)
            return
        if not overdue:
            return
        half_s = min(map(self._age_s, overdue)) / 2
        silent = [target for target in alive if self._age_s(target) >= half_s]
        if len(silent) < len(alive) and max(map(self._age_s, overdue)) < self._patience.start_s:
            return  # other ranks make progress: perhaps one of them evaluates, and the silent ones wait for it
        verdict = self._verdict(silent, gone)
        guilty = {judged.rank for judged in verdict.guilty}
        if any(target.claim.rank in guilty for target in (*overdue, *gone)):
            self._report(
                next((target for target in overdue if target.claim.rank in guilty), overdue[0]), verdict, silent
            )

    @staticmethod
    def _judged(members: Sequence[Target]) -> list[Target]:
        """Return the members that should make events."""
        pages = [(target, target.last()) for target in members if target.ended is None]
        alive = [target for target, page in pages if page is not None and page.state == "running"]
        # A launcher with an agent has a world size of 1, and is not judged together with the ranks that it has started.
        return [target for target in alive if target.identity.world_size > 1] or alive

    def _age_s(self, target: Target) -> float:
        return self._silences[target].age_s(self._now)

    def _is_overdue(self, target: Target, *, is_deserted: bool) -> bool:
        snapshot = target.last()
        silence = self._silences[target]
        return snapshot is not None and silence.is_overdue(target, snapshot, self._now, is_deserted=is_deserted)

    def _is_paused(self, target: Target) -> bool:
        progress = self._silences[target].progress
        return progress is not None and progress.phase == "paused"

    def _verdict(self, silent: Sequence[Target], gone: Sequence[Target] = ()) -> Verdict:
        ended = [
            RankPosition(target.claim.rank, ended=target.ended.reason) for target in gone if target.ended is not None
        ]
        return judge([*map(self._position, silent), *ended])

    def _position(self, target: Target) -> RankPosition:
        snapshot = target.last()
        assert snapshot is not None  # `_judged` selects targets with a snapshot
        return self._silences[target].position(target, snapshot, self._now)

    def _report(self, target: Target, verdict: Verdict, silent: Sequence[Target]) -> None:
        text = sentence(verdict, max(target.identity.world_size for target in silent))
        self._describe(verdict, silent, text)
        here = next(own for own in (*verdict.guilty, *verdict.waiting) if own.rank == target.claim.rank)
        self._reported[target] = _Reported(target, here.for_s, at_least=here.at_least)
        ranks = [dataclasses.asdict(own) for own in (*verdict.guilty, *verdict.waiting)]
        fields = {**(target.hang or {}), "is_step_absolute": here.is_absolute, "ranks": ranks}
        del fields["message"]
        self._fleet.report(target, HANG, text, place=self._silences[target].progress, **fields)

    @staticmethod
    def _describe(verdict: Verdict, silent: Sequence[Target], text: str) -> None:
        """Set `hang` of each target, which its row shows."""
        guilty = [own.rank for own in verdict.guilty]
        where = {own.rank: own for own in (*verdict.guilty, *verdict.waiting)}
        for target in silent:
            rank, own = target.claim.rank, where[target.claim.rank]
            target.hang = {
                "role": "stands" if rank in guilty else "waits",
                "waits_for": [] if rank in guilty else guilty,
                "basis": verdict.basis,
                "phase": own.phase,
                "module": own.module,
                "step": own.step,
                "for_s": round(own.for_s, 1),
                "at_least": own.at_least,
                "where": own.where,
                "message": text,
            }

    def _update(self, reported: _Reported, members: Sequence[Target]) -> None:
        """Update the duration of a hang that continues."""
        reported.for_s = reported.before_s + self._age_s(reported.target)
        for target in members:
            if target.hang is not None:
                for_s = reported.for_s if target is reported.target else self._age_s(target)
                target.hang = {**target.hang, "for_s": round(for_s, 1)}

    def _end(self, reported: _Reported, members: Sequence[Target]) -> None:
        """Report that the rank has moved or ended, and restart the wait of all members."""
        target = reported.target
        self._reported.pop(target, None)
        for member in members:
            member.hang = None
            self._silences[member].rearm(self._now)
        lasted = f"{'at least ' if reported.at_least else ''}{reported.for_s:.0f} s"
        message = f"rank {target.claim.rank} goes on after hanging for {lasted}"
        if target.ended is not None:
            what = "has ended" if target.state in GONE else "is no longer watched"
            message = f"rank {target.claim.rank} {what} ({target.ended.reason}) after hanging for {lasted}"
        self._fleet.report(target, OVER, message, lasted_s=round(reported.for_s, 1), at_least=reported.at_least)

    def _recall(self, new: Iterable[Target], members: Sequence[Target]) -> _Reported | None:
        """Find a hang that an earlier daemon has reported, and that had not ended at that daemon's last poll."""
        silent = self._judged(members)
        for target in new:
            if HANG in target.ongoing and target in silent:
                rows = self._fleet.store.query({(target.pid, target.start_ticks)}, kind=HANG, limit=1)
                detail = rows[0]["detail"] if rows else {}
                reported = _Reported(target, detail.get("for_s", 0.0), detail.get("for_s", 0.0), at_least=True)
                progress = self._silences[target].progress
                if progress is not None and detail.get("place") == list(progress):  # it has not moved since
                    self._reported[target] = reported
                    self._describe(self._verdict(silent), silent, rows[0]["message"])
                return reported
        return None

    def _forget(self, target: Target) -> None:
        """Forget a target that is not served any more."""
        del self._silences[target]
        self._reported.pop(target, None)


def _is_leaving(target: Target) -> bool:
    """Whether the agent of a target is detaching; it waits for threads that are inside a hooked call."""
    snapshot = target.last()
    return target.ended is None and snapshot is not None and snapshot.state == "detaching"
