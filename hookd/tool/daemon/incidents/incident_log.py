"""Log incidents as they happen, one line each, in the daemon's log or on the terminal of a foreground attach."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.linux.owner import user_name
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hookd.tool.daemon.fleet.last_session import FormerTarget
    from hookd.tool.daemon.fleet.targets import Target

LINES = 3
"""Maximum number of lines of one kind from one target in WINDOW_S seconds; further incidents are only counted."""
WINDOW_S = 30.0
KINDS = 20
"""Maximum number of different kinds in that time; there are about a dozen."""
_log = logging.getLogger(__name__)


@dataclass
class _Window:
    began: float
    lines: int = 0
    suppressed: int = 0


class IncidentLog:
    """Logs the incidents of one target, the first ones of each kind at once; used by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def add(self, target: Target | FormerTarget, incidents: Iterable[Mapping[str, object]]) -> None:
        """Log new incidents, unless there were too many of their kind."""
        now = self._clock()
        for incident in incidents:
            kind = one_line(incident.get("kind"))
            if len(self._windows) >= KINDS and kind not in self._windows:
                kind = "other kinds"
            window = self._windows.setdefault(kind, _Window(now))
            if window.lines < LINES:
                window.lines += 1
                _log.warning("%s", line(target, incident))
            else:
                window.suppressed += 1
        self._sum_up(target, now - WINDOW_S)

    def end(self, target: Target | FormerTarget) -> None:
        """Log the number of suppressed incidents, at the end of the target."""
        self._sum_up(target, self._clock())

    def _sum_up(self, target: Target | FormerTarget, until: float) -> None:
        """Close the windows that began at `until` or before."""
        for kind, window in list(self._windows.items()):
            if window.began <= until:
                del self._windows[kind]
                if window.suppressed:
                    _log.warning("%d more of %s %s: hookd report %d", window.suppressed, kind, who(target), target.pid)


def line(target: Target | FormerTarget, incident: Mapping[str, object]) -> str:
    """Return an incident as one line: kind, target and its user, step, message."""
    step = incident.get("step")
    counted = "" if incident.get("is_step_absolute", True) else " (counted from the attach)"
    message = one_line(incident.get("message"))
    is_said = not isinstance(step, int) or re.search(rf"\bstep {step}\b", message)
    return f"{one_line(incident.get('kind'))} {who(target)}{'' if is_said else f' at step {step}{counted}'}: {message}"


def who(target: Target | FormerTarget) -> str:
    """Return the description of a target in a line."""
    owner = user_name(target.claim.uid)
    whose = f" of user {one_line(owner)}" if owner else ""
    return f"in process {target.pid}{whose} (run {one_line(target.claim.run)}, rank {one_line(target.claim.rank)})"
