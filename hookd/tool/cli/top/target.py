"""A target in `hookd top`: its page and its entry in /proc, read at each refresh and kept after its end."""

from __future__ import annotations

import math
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from hookd.tool.cli.top.growth import Growth
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import uid_of
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.reading import INFERENCE, of_a_step
from hookd.tool.reports.report import describe_steps
from hookd.tool.reports.wording import hang_state, hang_words

if TYPE_CHECKING:
    from hookd.wire.page import Family, PageReader, Snapshot
    from hookd.wire.report import Steps
    from hookd.wire.target import TargetRow

WINDOW_S = 5.0
"""Seconds over which step rates are averaged; steps are too few for one interval."""
LATELY = 16
ASKED = "eval"
"""The kind of incident that records an evaluated expression; nothing is wrong with the target."""
BORN = ("nan", "inf")
OVER = ("detached", "exited")
"""States of a page in which the agent has left."""
LOSS = "hookd_activations_loss"
PHASES = "hookd_timing_phase_seconds"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Target:
    """One process and its page, with the daemon's row on it, if a daemon runs.

    Args:
        pid: of the process.
        start: its start time in clock ticks.
        reader: of its page, owned by the target; None if only the daemon may read the page.

    Attributes:
        snapshot: the last copy of the page.
        read_at: when it was read, in monotonic seconds.
        rss: resident memory in bytes, NaN if unknown.
        ended: a word for how it ended, "" while it runs.
        error: the reason why its page cannot be read.
        row: of the daemon, if there is one.
        lately: the mean seconds of recent steps at the last `LATELY` readings; NaN where there was none.
    """

    def __init__(self, pid: int, start: int, reader: PageReader | None) -> None:
        self.pid, self.start = pid, start
        self.snapshot: Snapshot | None = None
        self.rss = math.nan
        self.ended = ""
        self.error: HookdError | None = None
        self.row: TargetRow | None = None
        self.lately: deque[float] = deque(maxlen=LATELY)
        self._reader = reader
        self._user = user_name(uid_of(pid))
        self._steps, self._phases = Growth(WINDOW_S), Growth(WINDOW_S)
        self._now = self.read_at = 0.0

    def read(self, now: float) -> None:
        """Read /proc, then the page, unless the target has ended.

        Args:
            now: monotonic seconds.
        """
        self._now = now
        if self.ended:
            return
        is_there = self._read_stat()
        if self._reader is not None and self.error is None:
            try:
                self.snapshot, self.read_at = self._reader.read(), now
            except HookdError as error:
                self.error = error
        if not is_there or (self.snapshot is not None and self.snapshot.state in OVER):
            self._end(is_there=is_there)
        steps, counted = float(self.step["counted"]), self._counted()
        self._steps.advance(now, steps, counted)
        self.lately.append(self.step_s)
        family = self._family(PHASES)
        if family is not None and family.width == 1:
            self._phases.advance(now, steps, [family.cells[at] for at in family.first])

    def _read_stat(self) -> bool:
        """Read /proc/PID/stat: return whether the process lives, and set `rss`."""
        try:
            fields = proc.read(self.pid, "stat").rpartition(b")")[2].split()
        except (HookdError, OSError):
            return False
        if int(fields[19]) != self.start or fields[0] in (b"Z", b"X"):
            return False
        self.rss = int(fields[21]) * _PAGE_BYTES
        return True

    def _end(self, *, is_there: bool) -> None:
        state = self.snapshot.state if self.snapshot is not None else ""
        self.ended = "detached" if state == "detached" else "ended"
        self.rss = self.rss if is_there else math.nan
        self.close()

    def close(self) -> None:
        """Close the page; the last copy is kept."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _counted(self) -> list[float]:
        step = self.step
        times = self._family("hookd_step_seconds")
        if times is None or not times.first or times.width < 2:
            return [float(step["counted"])]
        at = times.first[0]
        cells = times.cells[at : at + times.width]
        return [float(step["counted"]), cells[-1], sum(cells[:-1])]

    def _family(self, name: str) -> Family | None:
        families = self.snapshot.families if self.snapshot is not None else []
        return next((family for family in families if family.name == name), None)

    def value(self, name: str) -> float:
        """Return the first value of a family, NaN if there is none."""
        family = self._family(name)
        return family.cells[family.first[0]] if family is not None and family.first else math.nan

    @property
    def run(self) -> str:
        """The label of its run: the daemon's, which resolves clashes, else the page's."""
        return (self.row["run"] if self.row is not None else "") or str(self._identity("run") or "-")

    @property
    def user(self) -> str:
        """The user who owns the process."""
        return (self.row["user"] if self.row is not None else "") or self._user

    @property
    def rank(self) -> str:
        """Its rank as text, since it is a label."""
        rank = self.row["rank"] if self.row is not None else self._identity("rank")
        return "-" if rank is None else str(rank)

    def _identity(self, key: str) -> Any:
        return self.snapshot.identity.get(key) if self.snapshot is not None else None

    @property
    def script(self) -> str:
        """The name of its script."""
        return str(self._identity("script") or (self.row["script"] if self.row is not None else "") or "-")

    @property
    def state(self) -> str:
        """One word: how it ended, why it cannot be read, the daemon's view, else the state in the page."""
        if self.ended:
            reason = self.row["reason"] if self.row is not None else None
            return self.ended if reason in (None, "", "exited") or self.ended == "detached" else str(reason)
        if self.error is not None:
            return self.error.reason
        if self.row is not None and self.row["hang"]:
            return hang_state(self.row["hang"])
        if self.snapshot is None:
            return self.row["state"] if self.row is not None else "-"
        is_paused = any(beat.phase == "paused" for beat in self.snapshot.heartbeats)
        return "paused" if is_paused and self.snapshot.state == "running" else self.snapshot.state

    @property
    def step(self) -> Steps:
        """Its steps, as returned by `hookd.tool.reports.report.describe_steps`."""
        if self.snapshot is not None:
            return describe_steps(self.snapshot)
        step = self.row["step"] if self.row is not None else None
        return step or {
            "counted": 0,
            "offset": 0,
            "current": 0,
            "is_absolute": True,
            "calls": 0,
            "micro_batches": None,
            "text": "-",
        }

    @property
    def steps_per_s(self) -> float:
        """Recent steps per second; NaN before two readings, and after the end."""
        elapsed = self._steps.elapsed_s
        if self.ended or not elapsed:
            return math.nan
        return 0.0 if self._steps.is_stale(self._now) else self._steps.columns[0][0] / elapsed

    @property
    def step_s(self) -> float:
        """Mean seconds of recent steps, NaN without any."""
        (grown,) = self._steps.columns or ([],)
        is_known = len(grown) > 2 and grown[2] > 0 and not self.ended and not self._steps.is_stale(self._now)
        return grown[1] / grown[2] if is_known else math.nan

    def phases(self) -> list[tuple[str, float]]:
        """Return each phase's share of the time of recent steps."""
        spent = of_a_step(self._phase_seconds())
        total = sum(spent.values())
        return [(phase, seconds / total) for phase, seconds in spent.items()] if total > 0 else []

    def inference_share(self) -> float:
        """Return the share of inference in the time since the step before last; it is not part of a step."""
        spent = self._phase_seconds()
        total = sum(spent.values())
        return spent.get(INFERENCE, 0.0) / total if total > 0 else 0.0

    def _phase_seconds(self) -> dict[str, float]:
        family, (grown,) = self._family(PHASES), self._phases.columns or ([],)
        if family is None or len(family.labels) != 1:
            return {}
        return {values[0]: seconds for values, seconds in zip(family.values, grown, strict=False)}

    @property
    def loss(self) -> float:
        """The loss of the last step, NaN if no plugin publishes it."""
        return self.value(LOSS)

    @property
    def incidents(self) -> int:
        """Number of its incidents: from the daemon, which adds those that it detects, else from the page."""
        if self.row is not None:
            return self.row["incidents"]
        return len(self.snapshot.incidents) if self.snapshot is not None else 0

    @property
    def message(self) -> str:
        """The details line: how it ended, where it hangs or waits, or its most important incident; "" without any."""
        if self.error is not None:
            return f"{self.error.message}. {self.error.hint}".rstrip()
        if self.row is not None and self.row["how"]:
            return f"it {self.row['how']}"
        if self.row is not None and self.row["hang"] and not self.ended:
            return hang_words(self.row["hang"])
        if self.snapshot is None:
            return "only the daemon can read its page: use `hookd report` for its modules, or run `hookd top` as root"
        rows = [row for row in self.snapshot.incidents if row.get("kind") != ASKED]
        foremost = next((row for row in rows if row.get("kind") in BORN), rows[-1] if rows else None)
        return "" if foremost is None else str(foremost.get("message") or foremost.get("kind") or "")
