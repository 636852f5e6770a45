"""Render the whole page, for a target, a run or an incident."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, cast

from hookd.errors import HookdError
from hookd.tool.cli import output
from hookd.tool.cli.report import of_user, of_world
from hookd.tool.cli.run_report import SLOW, median_step, of_step, ratio
from hookd.tool.cli.subject import rank_order
from hookd.tool.daemon.web.pages import parts, plots
from hookd.tool.daemon.web.pages.assets import STYLE, content
from hookd.tool.daemon.web.pages.html import Markup, table, tag
from hookd.tool.daemon.web.pages.plots import COLOURS
from hookd.tool.linux import private_file
from hookd.tool.reports.reading import counted, paused, run_and_rank, state, step_seconds
from hookd.tool.reports.wording import moment, process_of
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Optional

    from hookd.tool.cli.subject import Subject
    from hookd.wire.incident import Incident, IncidentRow
    from hookd.wire.report import Report

    Part = Optional[Markup]

MAX_CURVES = COLOURS
"""Maximum number of ranks whose curves are drawn: the slowest ones."""
MAX_TITLE = 200
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write(path: Path, subject: Subject) -> None:
    """Write the page to a file that only its owner can read: it reveals code and data.

    Raises:
        HookdError: the file cannot be written.
    """
    page = document(subject)
    try:
        with private_file.replacing(path) as file:
            file.write(page.encode())
    except OSError as exc:
        raise HookdError(f"cannot write {path}: {exc.strerror}", reason="output") from exc


def document(subject: Subject) -> str:
    """Return the page as HTML."""
    bodies = {"target": _target_page, "run": _run_page, "incident": _incident_page}
    title, body = bodies[subject.kind](subject)
    made = f"made {moment(time.time())} on {socket.gethostname()} by hookd {__version__}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title[:MAX_TITLE]} · hookd"),
        tag("style", Markup(content(STYLE))),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *body, tag('footer', made)), lang='en')}\n"


def _target_page(subject: Subject) -> tuple[str, Iterator[Part]]:
    report = subject.reports[0]
    run, rank = run_and_rank(report)
    script = report.get("identity", {}).get("script") or f"process {report['pid']}"
    return f"{script} · {run}, rank {rank}", _target(report)


def _target(report: Report) -> Iterator[Part]:
    yield from _heading(report)
    yield _section("Incidents", parts.incidents(report["incidents"]))
    yield from _numbers(report, parts.MAX_MODULES)
    yield _section("Threads", [parts.threads(report)])
    yield _section("What the agent has logged", [parts.logs(report)])


def _heading(report: Report) -> Iterator[Part]:
    identity, target = report["identity"], report.get("target", {})
    run, rank = run_and_rank(report)
    is_well = state(report) in ("running", "attached", "ended", "exited")
    yield tag("h1", identity.get("script") or "(no script)")
    how = f" ({target['reason']})" if target.get("reason") not in (None, state(report), "exited") else ""
    yield tag(
        "p",
        *("run ", tag("b", run), ", rank ", tag("b", rank), f"{of_world(identity)}, {of_user(report)} · "),
        tag("span", state(report) + how, class_="good" if is_well else "bad"),
    )
    if why := paused(report):
        yield tag("p", why, class_="bad")
    yield parts.tiles(
        (
            counted(report["step"]),
            ("a step, on average", output.seconds(step_seconds(report))),
            ("hookd's share", output.percent(report["overhead"]["ratio"])),
            ("incidents", len(report["incidents"])),
            ("modules observed", f"{report['observed'].get('observed') or 0:.0f}"),
        )
    )
    yield parts.facts(
        (
            ("started", _moment(identity.get("started"))),
            ("watched since", f"{_moment(identity.get('attached'))} ({identity.get('method')})"),
            ("ended", _moment(target.get("ended"))),
            ("Python, torch", f"{identity.get('python')}, {identity.get('torch')}"),
            ("agent", identity.get("agent_version")),
            ("hidden in compiled code", _unseen(report)),
        )
    )


def _numbers(report: Report, limit: int) -> Iterator[Part]:
    """Yield the sections with the measurements of a target."""
    yield _section("Time of a step", parts.curve(report))
    yield _section("Where a step's time goes", parts.phase_shares(report, step_seconds(report)))
    if report["modules"]:
        yield _section("Modules", parts.modules(report, limit))
    yield _section("Plugins and what they cost", [parts.plugins(report)])


def _run_page(subject: Subject) -> tuple[str, Iterator[Part]]:
    return f"run {subject.name}", _run(subject)


def _run(subject: Subject) -> Iterator[Part]:
    reports = subject.reports
    yield tag("h1", "run ", subject.name)
    if not reports:
        gone = f"None of the ranks of this run{subject.whose} is watched any more; only its stored incidents are shown."
        yield tag("p", gone)
    else:
        yield from _ranks(reports)
    yield _section("Incidents", parts.incidents([_as_on_page(row) for row in subject.rows]))
    if reports:
        yield tag("h2", "Each rank")
    for report in reports:
        summary = tag("summary", f"rank {run_and_rank(report)[1]}, process {report['pid']}")
        yield tag("details", summary, *_heading(report), *_numbers(report, 20), class_="card")


def _ranks(reports: Sequence[Report]) -> Iterator[Part]:
    """Yield the comparison of the ranks: a table, and their curves in one picture."""
    median = median_step(reports)
    slowest = max((step_seconds(report) or 0 for report in reports), default=0.0)
    yield parts.tiles(
        (
            ("ranks here", len(reports)),
            ("a step, median of ranks", output.seconds(median)),
            ("the slowest", ratio(slowest, median)),
            ("incidents", sum(len(report["incidents"]) for report in reports)),
        )
    )
    head = (">rank", ">pid", "state", ">step", ">a step", ">of median", "", ">forward", ">data", ">hookd's cost",
            ">incidents")  # fmt: skip
    yield _section("Ranks", [table("Ranks", head, [_rank_cells(report, median, slowest) for report in reports])])
    longest = sorted(reports, key=lambda report: step_seconds(report) or 0, reverse=True)
    drawn = sorted(longest[:MAX_CURVES], key=rank_order)
    curves = [
        plots.Curve(f"rank {run_and_rank(report)[1]}", n, report.get("curve") or []) for n, report in enumerate(drawn)
    ]
    legend = [tag("li", tag("i", class_=f"c{curve.colour}"), curve.label) for curve in curves]
    left_out = f" The {MAX_CURVES} slowest of {len(reports)} are drawn." if len(reports) > len(drawn) else ""
    note = f"Medians; steps are counted from the attach of each rank.{left_out}"
    yield _section(
        "Time of a step",
        [plots.step_times(curves), tag("ul", *legend, class_="legend"), tag("p", note, class_="soft")],
    )


def _rank_cells(report: Report, median: float | None, slowest: float) -> list[object]:
    seconds = step_seconds(report)
    is_slow = bool(seconds and median and seconds > SLOW * median)
    of_median = ratio(seconds, median)
    return [
        run_and_rank(report)[1],
        report["pid"],
        state(report),
        report["step"]["current"],
        output.seconds(seconds),
        tag("span", of_median, class_="bad") if is_slow else of_median,
        plots.bar(seconds / slowest) if seconds and slowest else "",
        output.seconds(of_step(report, "forward")),
        output.seconds(of_step(report, "data")),
        output.percent(report["overhead"]["ratio"]),
        len(report["incidents"]),
    ]


def _incident_page(subject: Subject) -> tuple[str, Iterator[Part]]:
    row = subject.rows[0]
    return f"incident #{row['id']}: {row['kind']}", _incident(subject)


def _incident(subject: Subject) -> Iterator[Part]:
    row = subject.rows[0]
    yield tag("h1", f"incident #{row['id']}: {row['kind']}")
    process = process_of(row["pid"], row.get("user", ""))
    yield tag("p", "run ", tag("b", row["run"]), ", rank ", tag("b", row["rank"]), f", {process}")
    yield _section("What happened", [parts.incident(_as_on_page(row), is_first=True)])
    for report in subject.reports:
        yield tag("h2", "Its process, as it is now")
        yield from _heading(report)
        yield from _numbers(report, parts.MAX_MODULES)


def _as_on_page(row: IncidentRow) -> Incident:
    """Return a row as an incident of a page, with its rank and process."""
    names = ("id", "time", "kind", "message", "module", "step", "count", "last")
    shown = {name: value for name, value in row.items() if name in names}
    return cast("Incident", {**row["detail"], **shown, "rank": row["rank"], "process": row["pid"]})


def _section(title: str, body: Iterable[Part]) -> Markup:
    return tag("section", tag("h2", title), *body)


def _moment(unix_s: object) -> str:
    return moment(unix_s) if isinstance(unix_s, (int, float)) and unix_s > 0 else ""


def _unseen(report: Report) -> str:
    unseen = {name: count for name, count in report["observed"].items() if name != "observed" and count}
    return ", ".join(f"{count:.0f} {name.replace('_', ' ')}" for name, count in unseen.items())
