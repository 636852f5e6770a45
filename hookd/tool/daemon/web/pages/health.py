"""How each target is, in a few words, and which is the worst: the order of the tables, and what a run's page begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.web.pages.html import Markup, tag
from hookd.tool.reports import wording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.incident import Incident
    from hookd.wire.target import TargetRow

GONE, HANGS, BAD_NUMBERS, GOES_ON, WAITS, FOUND, FINE, OVER = range(8)
"""What is worst comes first: a target that was lost, one that others wait for, a NaN, what is going on (a straggler, a drift),
one that waits, an incident, a target without any, and one that has ended as it should."""
MILD = ("training_changed", "eval")
MAX_BANNERS = 3
NUMBERS = {"nan": "NaN", "inf": "infinity"}
_CLASSES = {GONE: "bad", HANGS: "bad", BAD_NUMBERS: "bad", GOES_ON: "bad", WAITS: "warn", FINE: "good", OVER: "soft"}


class Health(NamedTuple):
    """How a target is.

    Attributes:
        level: GONE to OVER; the lower, the worse.
        words: a few, for a table.
        sentence: more of them, for the head of a page; the same if there is no more to say.
    """

    level: int
    words: str
    sentence: str

    @classmethod
    def of(cls, target: Target, row: TargetRow) -> Health:
        """Judge a target by the daemon's row for it, and by the last copy of its page."""
        return next(_judged(target, row))

    def markup(self) -> Markup:
        """Return the words, coloured."""
        return tag("span", self.words, class_=_CLASSES.get(self.level))

    @property
    def is_bad(self) -> bool:
        """Whether somebody should look at it now."""
        return self.level <= GOES_ON


def is_mild(kind: str) -> bool:
    """Whether incidents of this kind are not faults: actions of users, and the ends of other incidents."""
    return kind in MILD or kind.endswith("_over")


def _judged(target: Target, row: TargetRow) -> Iterator[Health]:
    """Yield what applies to a target, the worst first, and always something."""
    message = row["state"] if row["reason"] in (None, row["state"], "exited") else f"{row['state']}: {row['reason']}"
    if row["state"] in ("lost", "corrupt"):
        yield Health(GONE, message, f"it {row['how']}" if row["how"] else message)
    if target.ended is not None:
        yield Health(OVER, message, message)
    hang = row["hang"]
    if hang and wording.hang_state(hang) == "hangs":
        yield Health(HANGS, f"hangs {hang['where']}", hang["message"])
    snapshot = target.last()
    incidents = [_Said.of(one) for one in (snapshot.incidents if snapshot is not None else ())]
    incidents = [one for one in incidents if not is_mild(one.kind)]
    if bad := next((one for one in incidents if one.kind in NUMBERS), None):
        yield Health(BAD_NUMBERS, f"{NUMBERS[bad.kind]}{bad.at}", bad.message)
    if going_on := {kind: one for kind, one in row["ongoing"].items() if kind != "hang"}:
        yield Health(GOES_ON, ", ".join(going_on), "; ".join(one["message"] for one in going_on.values()))
    if hang:
        yield Health(WAITS, f"waits {hang['where']}", hang["message"])
    if incidents:
        yield Health(FOUND, incidents[-1].kind, incidents[-1].message)
    is_paused = snapshot is not None and any(beat.phase == "paused" for beat in snapshot.heartbeats)
    words = "paused" if is_paused else "running" if row["state"] == "attached" else message
    yield Health(FINE, words, words)


class _Said(NamedTuple):
    """An incident of a page, which may hold anything."""

    kind: str
    at: str
    message: str

    @classmethod
    def of(cls, incident: Incident) -> _Said:
        step = incident.get("step")
        return cls(
            str(incident.get("kind", "")),
            f" at step {step:,}" if isinstance(step, int) else "",
            str(incident.get("message", "")),
        )


def banners(found: Sequence[tuple[str, Health]]) -> Iterator[Markup]:
    """Return a banner for each of the worst of some ranks, by name, and one line for the rest."""
    bad = [(name, health) for name, health in found if health.is_bad]
    for name, health in bad[:MAX_BANNERS]:
        yield tag("p", tag("b", f"rank {name}: "), health.sentence, class_="banner", role="alert")
    if len(bad) > MAX_BANNERS:
        yield tag("p", f"{wording.count(len(bad) - MAX_BANNERS, 'more rank')} with something wrong.", class_="soft")
