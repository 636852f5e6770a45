"""`/`: the targets by run, the last incidents, and the state of the daemon."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages import ranks
from hookd.tool.daemon.web.pages.health import is_mild
from hookd.tool.daemon.web.pages.html import Markup, address, join, link, section, table, tag
from hookd.tool.daemon.web.pages.ranks import Rank
from hookd.tool.reports import wording
from hookd.tool.reports.wording import count, moment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookd.tool.daemon.fleet.history import History
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.plugins.rows import PanelRow
    from hookd.wire.incident import IncidentRow
    from hookd.wire.target import Server

MOST = 500
"""Maximum number of targets shown; the API returns all."""
INCIDENTS = 15


def parts(
    targets: Sequence[Target],
    history: History,
    incidents: Sequence[IncidentRow],
    health: Mapping[str, object],
    panels: Sequence[PanelRow] = (),
) -> list[Markup]:
    """Return the parts of the page.

    Args:
        targets: all targets.
        history: their history.
        incidents: rows of the last incidents, from the store.
        health: facts about the daemon by name, see `health_facts`; None is left out.
        panels: tables of the daemon plugins, see `plugins.host.Host.panels`.
    """
    shown = ranks.worst_first([Rank.of(target, history) for target in targets[:MOST]])
    return [
        tag("h1", "hookd: the targets of this node", class_="visually-hidden"),
        section("targets", "Targets", *_targets(shown, len(targets))),
        section("incidents", "Last incidents", incident_table(incidents, "Last incidents")),
        *map(_panel, panels),
        section("daemon", "This daemon", _facts(health)),
    ]


def _panel(panel: PanelRow) -> Markup:
    rows = ([_cell(value) for value in row] for row in panel["rows"])
    return section(f"panel-{panel['plugin']}", panel["title"], table(panel["title"], panel["columns"], rows))


def _cell(value: str | float | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _targets(shown: Sequence[Rank], total: int) -> list[object]:
    if not shown:
        return [tag("p", "None yet. ", tag("code", "hookd ps"), " lists processes that can be attached to, ",
                    tag("code", "hookd attach PID"), " attaches to one.", class_="soft")]  # fmt: skip
    head = ("run", ">rank", "health", *ranks.NUMBERS, ">incidents", "user", ">pid", "script")
    said = [] if len(shown) == total else [tag("p", f"The first {len(shown)} of {total}.", class_="soft")]
    changing = dict.fromkeys(str(rank.row["run"]) for rank in shown if rank.changed_by)
    links = [part for run in changing for part in (", ", link(address("run", run), run))][1:]
    banner = tag("p", tag("b", "A plugin changes the training"), " in run ", *links, class_="banner", role="alert")
    summary = f"{count(total, 'target')} of {count(len({rank.row['run'] for rank in shown}), 'run')}"
    return [
        banner if changing else None,
        tag("p", summary, class_="soft"),
        table("Targets by run", head, map(_row, shown)),
        *said,
    ]


def _row(rank: Rank) -> list[object]:
    row = rank.row
    run = str(row["run"])
    return [
        link(address("run", run), run),
        link(rank.where, row["rank"]),
        rank.health.markup(),
        *ranks.numbers(rank),
        ranks.incident_count(rank),
        row["user"],
        row["pid"],
        tag("span", str(row["script"]).rpartition("/")[2], title=row["script"]),
    ]


def incident_table(rows: Sequence[IncidentRow], caption: str, *, has_run: bool = True) -> Markup:
    """Return a table of incidents, each with the owner of the process and a link to its page."""
    if not rows:
        return tag("p", "None.", class_="soft")
    head = ("incident", "kind", "what", "when", *(["run"] if has_run else []), ">rank", "module", "user")
    return table(caption, head, [_incident(row, has_run=has_run) for row in rows], stacks=True)


def _incident(row: IncidentRow, *, has_run: bool) -> list[object]:
    number = row["id"]
    return [
        "not stored yet" if number is None else link(address("incident", str(number)), f"#{number}"),
        tag("span", row["kind"], class_="kind mild" if is_mild(row["kind"]) else "kind"),
        f"{row['message']}{wording.repeated(row)}",
        tag("span", moment(row["time"]), class_="when"),
        *([link(address("run", str(row["run"])), row["run"])] if has_run else []),
        row["rank"],
        tag("span", row["module"] or "", class_="mono"),
        row["user"],
    ]


def _facts(health: Mapping[str, object]) -> Markup:
    rows = [
        tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in health.items() if value is not None
    ]
    return tag("table", tag("tbody", *rows), class_="facts")


def health_facts(status: Server, own: Mapping[str, float | None]) -> dict[str, object]:
    """Return facts about the state of the daemon.

    Args:
        status: the result of `Service.status`.
        own: `resident_bytes`, `cpu_s`, `scrape_s`, `attached`, `refused`.
    """
    up_s = max(1.0, time.time() - float(status["started"]))
    resident, cpu_s = own["resident_bytes"], own["cpu_s"]
    kind = " (of a foreground attach)" if status["is_embedded"] else ""
    return {
        "process": f"{status['pid']}{kind}, up for {wording.span(up_s)}, since {moment(status['started'])}",
        "control socket": join(tag("code", status["control"])),
        "attaches": f"{own['attached'] or 0:.0f} done, {own['refused'] or 0:.0f} refused",
        "attach by rule": f"{count(status['rules'], 'rule')}, {len(status['backing_off'])} waiting for a retry",
        "last scrape": wording.seconds(own["scrape_s"]) + " to collect" if own["scrape_s"] else "none yet",
        "memory": None if resident is None else f"{resident / 1e6:,.0f} MB",
        "CPU": None
        if cpu_s is None
        else f"{wording.seconds(cpu_s)}, {wording.percent(cpu_s / up_s)} of one since the start",
    }
