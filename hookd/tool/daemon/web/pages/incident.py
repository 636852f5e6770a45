"""`/incident/ID`: what happened, where, since when, and what to do next. Also the "Not found" page."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any, cast

from hookd.tool.daemon.web.pages import parts as shared
from hookd.tool.daemon.web.pages.curves import Line, course
from hookd.tool.daemon.web.pages.health import is_mild
from hookd.tool.daemon.web.pages.html import Markup, address, join, link, tag
from hookd.tool.reports import wording
from hookd.tool.reports.wording import moment, process_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hookd.wire.incident import Incident, IncidentRow

SHOWN = ("id", "time", "kind", "message", "module", "step", "count", "last")
"""Columns of a row that are shown like the fields of an incident."""
OF_STEPS = {"loss": "Loss", "largest_gradient": "Largest gradient"}
"""Fields of the steps before an incident that are drawn."""
_NEXT = {
    "nan": [("save the tensors behind the next one, to replay it elsewhere", "hookd plugin enable {pid} capture")],
    "hang": [("the frames of every thread, also while it hangs", "hookd stack {pid}")],
    "straggler": [("what it does, sampled from outside", "hookd record {pid}")],
    "memory_growth": [("which modules keep memory", "hookd plugin enable {pid} memory")],
}
_NEXT["inf"] = _NEXT["nan"]
_NEXT["slowdown"] = _NEXT["straggler"]
"""What helps further with incidents of a kind, as long as their process lives."""


def parts(row: IncidentRow, *, is_watched: bool, now: float) -> list[Markup]:
    """Return the parts of the page of an incident; `now` is Unix time in seconds."""
    shown = {key: value for key, value in row.items() if key in SHOWN}
    whole = cast("Incident", {**row["detail"], **shown})
    details = join(*shared.details(whole))
    made = [
        tag(
            "h1",
            f"incident #{row['id']}: ",
            tag("span", row["kind"], class_="kind mild" if is_mild(row["kind"]) else "kind"),
        ),
        tag("p", row["message"], class_="lead"),
        shared.facts(_where(row, is_watched=is_watched, now=now)),
        *_courses(row["detail"]),
        tag("h2", "What to do next"),
        tag(
            "ul",
            *(
                tag("li", tag("code", command, class_="copy"), f": {why}")
                for why, command in _next(row, is_watched=is_watched)
            ),
        ),
        *([tag("h2", "What is recorded"), details] if details else []),
    ]
    return [part for part in made if part is not None]


def _where(row: IncidentRow, *, is_watched: bool, now: float) -> Iterator[tuple[str, object]]:
    """Yield what, where and when, with links."""
    run, module, step = str(row["run"]), row["module"], row["step"]
    yield "run", link(address("run", run), run)
    process = process_of(row["pid"], row["user"])
    who = link(address("run", run, pid=row["pid"]), process) if is_watched else f"{process}, which has ended"
    yield "rank", join(f"{row['rank']}, ", who)
    if module:
        yield (
            "module",
            link(address("run", run, pid=row["pid"], q=module, at="modules"), module) if is_watched else module,
        )
    if step is not None:
        is_absolute = row["detail"].get("is_step_absolute", True)
        yield "step", f"{step:,}" + ("" if is_absolute else " (counted from the attach)")
    yield "since", f"{moment(row['time'])}, {wording.span(max(0.0, now - row['time']))} ago"
    if row["count"] > 1:
        yield "repeated", f"{row['count']:,} times, last at {moment(row['last'])}"
    yield "reported by", row["detail"].get("plugin") or "the daemon"


def _courses(detail: Mapping[str, Any]) -> Iterator[Markup | None]:
    """Draw the numbers of the steps before it that were recorded."""
    rows = [
        row for row in detail.get("steps_before") or () if isinstance(row, dict) and isinstance(row.get("step"), int)
    ]
    drawn = []
    for name, title in OF_STEPS.items():
        points = [(float(row["step"]), float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]
        if sum(math.isfinite(value) for _, value in points) > 2:
            drawn.append(course(f"{title} of the steps before", Line(title, 0, points), wording.number))
    yield tag("div", *drawn, class_="pictures") if drawn else None


def _next(row: IncidentRow, *, is_watched: bool) -> Iterator[tuple[str, str]]:
    """Yield commands that help further, with what each does."""
    if bundle := row["detail"].get("bundle"):
        yield "compute it again from the saved tensors, in another process", f"hookd replay {shlex.quote(str(bundle))}"
    if is_watched:
        for why, command in _NEXT.get(row["kind"], ()):
            yield why, command.format(pid=row["pid"])
        yield "what the process does now, module by module", f"hookd report {row['pid']}"
    yield "all that is recorded, in a terminal", f"hookd report '#{row['id']}'"
    yield "what else happened in this run", f"hookd incidents --run {shlex.quote(str(row['run']))}"


def missing(what: str, runs: Sequence[str]) -> list[Markup]:
    """Return the parts of the "Not found" page, with links to the existing runs."""
    links = [tag("li", link(address("run", run), run)) for run in runs]
    there = join(tag("p", "Existing runs:"), tag("ul", *links)) if links else tag("p", "There are no targets now.")
    return [tag("h1", "Not found"), tag("p", what), there, tag("p", link("/", "All targets"))]
