"""Render the whole page, for a target, a run or an incident."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, cast

from hookd.errors import HookdError
from hookd.tool.cli import output
from hookd.tool.cli.report import of_user, of_world
from hookd.tool.cli.run_report import SLOW, median_step, of_step, ratio
from hookd.tool.daemon.web.pages import parts, plots
from hookd.tool.daemon.web.pages.assets import STYLE, content
from hookd.tool.daemon.web.pages.plots import COLOURS
from hookd.tool.daemon.web.pages.text import text
from hookd.tool.reports.reading import counted, paused, state, step_seconds
from hookd.tool.reports.wording import moment, process_of
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hookd.tool.cli.subject import Subject
    from hookd.wire.incident import Incident, IncidentRow
    from hookd.wire.report import Report

MAX_CURVES = COLOURS
"""Maximum number of ranks whose curves are drawn: the slowest ones."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write(path: Path, subject: Subject) -> None:
    """Write the page to a file that only its owner can read: it reveals code and data.

    Raises:
        HookdError: the file cannot be written.
    """
    page = document(subject)
    try:
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(page)
        part.replace(path)
    except OSError as exc:
        raise HookdError(f"cannot write {path}: {exc.strerror}", reason="output") from exc


def document(subject: Subject) -> str:
    """Return the page as HTML."""
    bodies = {"target": _target_page, "run": _run_page, "incident": _incident_page}
    title, body = bodies[subject.kind](subject)
    made = f"made {moment(time.time())} on {socket.gethostname()} by hookd {__version__}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{text(title, 200)} · hookd</title><style>{content(STYLE)}</style></head><body>
{"".join(body)}
<footer>{text(made)}</footer>
</body></html>
"""


def _target_page(subject: Subject) -> tuple[str, Iterator[str]]:
    report = subject.reports[0]
    run, rank = _run_and_rank(report)
    script = report.get("identity", {}).get("script") or f"process {report['pid']}"
    return f"{script} · {run}, rank {rank}", _target(report)


def _target(report: Report) -> Iterator[str]:
    yield from _heading(report)
    yield from _section("Incidents", parts.incidents(report["incidents"]))
    yield from _numbers(report, parts.MAX_MODULES)
    yield from _section("Threads", [parts.threads(report)])
    yield from _section("What the agent has logged", [parts.logs(report)])


def _heading(report: Report) -> Iterator[str]:
    identity, target = report["identity"], report.get("target", {})
    run, rank = _run_and_rank(report)
    is_well = state(report) in ("running", "attached", "exited")
    yield f"<h1>{text(identity.get('script') or '(no script)')}</h1>"
    how = f" ({target['reason']})" if target.get("reason") not in (None, state(report)) else ""
    yield (
        f"<p>run <b>{text(run)}</b>, rank <b>{text(rank)}</b>{of_world(identity)}, {text(of_user(report))} · "
        f'<span class="{"good" if is_well else "bad"}">{text(state(report) + how)}</span></p>'
    )
    if why := paused(report):
        yield f'<p class="bad">{text(why)}</p>'
    yield parts.tiles(
        (
            counted(report["step"]),
            ("a step, on average", output.seconds(step_seconds(report))),
            ("of it hookd's cost", output.percent(report["overhead"]["ratio"])),
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
            ("not seen inside", _unseen(report)),
        )
    )


def _numbers(report: Report, limit: int) -> Iterator[str]:
    """Yield the sections with the measurements of a target."""
    yield from _section("Time of a step", parts.curve(report))
    yield from _section("Where a step's time goes", parts.phase_shares(report, step_seconds(report)))
    if report["modules"]:
        yield from _section("Modules", parts.modules(report, limit))
    yield from _section("Plugins and what they cost", [parts.plugins(report)])


def _run_page(subject: Subject) -> tuple[str, Iterator[str]]:
    return f"run {subject.name}", _run(subject)


def _run(subject: Subject) -> Iterator[str]:
    reports = subject.reports
    yield f"<h1>run {text(subject.name)}</h1>"
    if not reports:
        yield f"<p>None of the ranks of this run{text(subject.whose)} is watched any more; only its stored incidents are shown.</p>"
    else:
        yield from _ranks(reports)
    yield from _section("Incidents", parts.incidents([_told(row) for row in subject.rows]))
    if reports:
        yield "<h2>Each rank</h2>"
    for report in reports:
        _, rank = _run_and_rank(report)
        inner = "".join([*_heading(report), *_numbers(report, 20)])
        yield f'<details class="card"><summary>rank {text(rank)}, process {report["pid"]}</summary>{inner}</details>'


def _ranks(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the comparison of the ranks: a table, and their curves in one picture."""
    median = median_step(reports)
    slowest = max((step_seconds(one) or 0 for one in reports), default=0.0)
    yield parts.tiles(
        (
            ("ranks here", len(reports)),
            ("a step, median of ranks", output.seconds(median)),
            ("the slowest", ratio(slowest, median)),
            ("incidents", sum(len(one["incidents"]) for one in reports)),
        )
    )
    head = (">rank", ">pid", "state", ">step", ">a step", ">of median", "", ">forward", ">data", ">hookd's cost",
            ">incidents")  # fmt: skip
    yield from _section("Ranks", [parts.table(head, [_rank_cells(one, median, slowest) for one in reports])])
    drawn = sorted(sorted(reports, key=lambda one: step_seconds(one) or 0, reverse=True)[:MAX_CURVES], key=_rank_order)
    curves = [plots.Curve(f"rank {_run_and_rank(one)[1]}", n, one.get("curve") or []) for n, one in enumerate(drawn)]
    legend = "".join(f'<li><i class="c{one.colour}"></i>{text(one.label)}</li>' for one in curves)
    left_out = f" The {MAX_CURVES} slowest of {len(reports)} are drawn." if len(reports) > len(drawn) else ""
    yield from _section(
        "Time of a step",
        [plots.step_times(curves), f'<ul class="legend">{legend}</ul>',
         f'<p class="soft">Medians; steps are counted from the attach of each rank.{left_out}</p>'],
    )  # fmt: skip


def _rank_cells(report: Report, median: float | None, slowest: float) -> list[str]:
    seconds = step_seconds(report)
    is_slow = bool(seconds and median and seconds > SLOW * median)
    of_median = text(ratio(seconds, median))
    return [
        text(_run_and_rank(report)[1]),
        text(report["pid"]),
        text(state(report)),
        text(report["step"]["current"]),
        output.seconds(seconds),
        f'<span class="bad">{of_median}</span>' if is_slow else of_median,
        plots.bar(seconds / slowest) if seconds and slowest else "",
        output.seconds(of_step(report, "forward")),
        output.seconds(of_step(report, "data")),
        output.percent(report["overhead"]["ratio"]),
        text(len(report["incidents"])),
    ]


def _rank_order(report: Report) -> tuple[int, str]:
    rank = str(_run_and_rank(report)[1])
    return (int(rank) if rank.isdecimal() else 1 << 30, rank)


def _incident_page(subject: Subject) -> tuple[str, Iterator[str]]:
    row = subject.rows[0]
    return f"incident #{row['id']}: {row['kind']}", _incident(subject)


def _incident(subject: Subject) -> Iterator[str]:
    row = subject.rows[0]
    yield f"<h1>incident #{row['id']}: {text(row['kind'])}</h1>"
    yield f"<p>run <b>{text(row['run'])}</b>, rank <b>{text(row['rank'])}</b>, {text(process_of(row))}</p>"
    yield from _section("What happened", [parts.incident(_told(row), is_first=True)])
    for report in subject.reports:
        yield "<h2>Its process, as it is now</h2>"
        yield from _heading(report)
        yield from _numbers(report, parts.MAX_MODULES)


def _told(row: IncidentRow) -> Incident:
    """Return a row as an incident of a page, with its rank and process."""
    names = ("id", "time", "kind", "message", "module", "step", "count", "last")
    shown = {name: value for name, value in row.items() if name in names}
    return cast("Incident", {**row["detail"], **shown, "rank": row["rank"], "process": row["pid"]})


def _section(title: str, body: Iterator[str] | Sequence[str]) -> Iterator[str]:
    yield f"<section><h2>{title}</h2>"
    yield from body
    yield "</section>"


def _run_and_rank(report: Report) -> tuple[object, object]:
    identity, target = report.get("identity", {}), report.get("target", {})
    return target.get("run", identity.get("run")), target.get("rank", identity.get("rank"))


def _moment(unix_s: object) -> str:
    return moment(unix_s) if isinstance(unix_s, (int, float)) and unix_s > 0 else ""


def _unseen(report: Report) -> str:
    found = {name: count for name, count in report["observed"].items() if name != "observed" and count}
    return ", ".join(f"{count:.0f} {name.replace('_', ' ')}" for name, count in found.items())
