"""`/incident/ID`: the recorded details of one incident. Also the "Not found" page."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hookd.tool.daemon.web.pages import parts as shared
from hookd.tool.daemon.web.pages.html import Markup, address, join, link, tag
from hookd.tool.reports.wording import process_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.wire.incident import Incident, IncidentRow

SHOWN = ("id", "time", "kind", "message", "module", "step", "count", "last")
"""Columns of a row that are shown like the fields of an incident."""


def parts(row: IncidentRow, *, is_watched: bool) -> list[Markup]:
    """Return the parts of the page of an incident."""
    shown = {key: value for key, value in row.items() if key in SHOWN}
    whole = cast("Incident", {**row["detail"], **shown})
    run = str(row["run"])
    whose = join("run ", link(address("run", run), run), f", rank {row['rank']}, {process_of(row['pid'], row['user'])}")
    where = address("run", run, pid=row["pid"])
    now = (
        tag("p", link(where, "Its process as it is now"))
        if is_watched
        else tag("p", "Its process has ended.", class_="soft")
    )
    return [
        tag("h1", f"incident #{row['id']}: {row['kind']}"),
        tag("p", whose),
        shared.incident(whole, is_first=True),
        now,
        tag("p", "In a terminal: ", tag("code", f"hookd report '#{row['id']}'")),
    ]


def missing(what: str, runs: Sequence[str]) -> list[Markup]:
    """Return the parts of the "Not found" page, with links to the existing runs."""
    links = [tag("li", link(address("run", run), run)) for run in runs]
    there = join(tag("p", "Existing runs:"), tag("ul", *links)) if links else tag("p", "There are no targets now.")
    return [tag("h1", "Not found"), tag("p", what), there, tag("p", link("/", "All targets"))]
