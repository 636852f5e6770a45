"""A target as `hookd top` follows it: its page and its line in /proc, read again and again, also after its end."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from hookd.tool.cli.top.growth import Growth
from hookd.tool.linux import proc
from hookd.tool.linux.accounts import uid_of
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.report import describe_steps

if TYPE_CHECKING:
    from hookd.wire.page import Family, PageReader, Snapshot

WINDOW_S = 5.0
"""Steps are few: those of so many seconds make a rate that does not jump."""
ASKED = "eval"
"""The kind of incident that is kept of what somebody has evaluated: nothing is wrong with the target."""
BORN = ("nan", "inf")
OVER = ("detached", "exited")
"""States of a page in which the agent has left."""
LOSS = "hookd_activations_loss"
PHASES = "hookd_timing_phase_seconds"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Target:
    """One process and its page. What the daemon says of it, where one runs, is taken as it is.

    Args:
        pid: of the process.
        start: its start time in clock ticks.
        reader: of its page, which belongs to the target from now on; None where only the daemon may read it.

    Attributes:
        snapshot: the last copy of the page.
        read_at: when that was, in monotonic seconds.
        rss: bytes that it holds in memory, NaN where that is not known.
        ended: how it ended, in a word; empty while it runs.
        error: why its page cannot be read.
        told: the daemon's row of it.
    """

    def __init__(self, pid: int, start: int, reader: PageReader | None) -> None:
        self.pid, self.start = pid, start
        self.snapshot: Snapshot | None = None
        self.rss = math.nan
        self.ended = ""
        self.error: HookdError | None = None
        self.told: dict[str, Any] = {}
        self._reader = reader
        self._user = user_name(uid_of(pid))
        self._steps, self._phases = Growth(WINDOW_S), Growth(WINDOW_S)
        self._now = self.read_at = 0.0

    def read(self, now: float) -> None:
        """Read /proc, then the page: `now` in monotonic seconds. One that has ended is read no more."""
        self._now = now
        if self.ended:
            return
        is_there = self._look()
        if self._reader is not None and self.error is None:
            try:
                self.snapshot, self.read_at = self._reader.read(), now
            except HookdError as error:
                self.error = error
        if not is_there or (self.snapshot is not None and self.snapshot.state in OVER):
            self._end(is_there=is_there)
        steps, counted = float(self.step["counted"]), self._counted()
        self._steps.advance(now, steps, counted)
        family = self._family(PHASES)
        if family is not None and family.width == 1:
            self._phases.advance(now, steps, [family.cells[at] for at in family.first])

    def _look(self) -> bool:
        """Read its line in /proc: whether it lives, and how much memory it holds."""
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
        self.ended = state if state in OVER else "ended"
        self.rss = self.rss if is_there else math.nan
        self.close()

    def close(self) -> None:
        """Let go of the page; the last copy stays."""
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
        """Give the first value of a family, NaN where there is none."""
        family = self._family(name)
        return family.cells[family.first[0]] if family is not None and family.first else math.nan

    @property
    def run(self) -> str:
        """The label of its run: the daemon's, which knows of clashes, else the page's."""
        return str(self.told.get("run") or self._identity("run") or "-")

    @property
    def user(self) -> str:
        """The user to whom the process belongs."""
        return str(self.told.get("user") or self._user)

    @property
    def rank(self) -> str:
        """Its rank, as text: a label."""
        told = self.told.get("rank", self._identity("rank"))
        return "-" if told is None else str(told)

    def _identity(self, key: str) -> Any:
        return self.snapshot.identity.get(key) if self.snapshot is not None else None

    @property
    def script(self) -> str:
        """What it runs."""
        return str(self._identity("script") or self.told.get("script") or "-")

    @property
    def state(self) -> str:
        """One word: how it ended, why it cannot be read, what the daemon sees, else what the page says."""
        if self.ended:
            reason = self.told.get("reason")
            return self.ended if not reason or self.ended == "detached" else str(reason)
        if self.error is not None:
            return self.error.reason
        if self.told.get("hang"):
            return "hangs"
        if self.snapshot is None:
            return str(self.told.get("state", "-"))
        is_paused = any(beat.phase == "paused" for beat in self.snapshot.heartbeats)
        return "paused" if is_paused and self.snapshot.state == "running" else self.snapshot.state

    @property
    def step(self) -> dict[str, Any]:
        """Where it stands, as `hookd.tool.reports.report.describe_steps` has it."""
        if self.snapshot is not None:
            return describe_steps(self.snapshot)
        told = self.told.get("step")
        return told if isinstance(told, dict) else {"counted": 0, "current": 0, "is_absolute": True, "text": "-"}

    @property
    def steps_per_s(self) -> float:
        """Steps a second of late; NaN before two readings, and of one that has ended."""
        elapsed = self._steps.elapsed_s
        if self.ended or not elapsed:
            return math.nan
        return 0.0 if self._steps.is_stale(self._now) else self._steps.columns[0][0] / elapsed

    @property
    def step_s(self) -> float:
        """Seconds of a step of late, NaN without one."""
        (grown,) = self._steps.columns or ([],)
        is_known = len(grown) > 2 and grown[2] > 0 and not self.ended and not self._steps.is_stale(self._now)
        return grown[1] / grown[2] if is_known else math.nan

    def phases(self) -> list[tuple[str, float]]:
        """Give the share of each phase in the time of a step of late."""
        family, (grown,) = self._family(PHASES), self._phases.columns or ([],)
        if family is None or len(family.labels) != 1 or sum(grown) <= 0:
            return []
        return [(values[0], seconds / sum(grown)) for values, seconds in zip(family.values, grown, strict=False)]

    @property
    def loss(self) -> float:
        """The loss of the last step, where a plugin publishes it."""
        return self.value(LOSS)

    @property
    def incidents(self) -> int:
        """How many incidents it has: of its page, and with a daemon those that the daemon has seen."""
        told = self.told.get("incidents")
        return told if isinstance(told, int) else len(self.snapshot.incidents) if self.snapshot is not None else 0

    @property
    def message(self) -> str:
        """Say what a person should know of it: how it ended, where it hangs, its foremost incident; "" for nothing."""
        if self.error is not None:
            return f"{self.error.message}. {self.error.hint}".rstrip()
        if self.told.get("how"):
            return f"it {self.told['how']}"
        hang = self.told.get("hang")
        if isinstance(hang, dict) and not self.ended:
            return f"hangs {hang.get('where', '')} for {hang.get('for_s', 0):.0f} s"
        if self.snapshot is None:
            return "only the daemon can read its page: its modules are in `hookd report`, or here for root"
        rows = [one for one in self.snapshot.incidents if one.get("kind") != ASKED]
        born = next((one for one in rows if one.get("kind") in BORN), rows[-1] if rows else {})
        return str(born.get("message") or born.get("kind") or "")
