"""Parts of the report: incidents, phases, modules, plugins. Strings from a target are escaped by `text`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages import plots
from hookd.tool.daemon.web.pages.plots import COLOURS
from hookd.tool.daemon.web.pages.text import text
from hookd.tool.reports import wording
from hookd.tool.reports.reading import SHOWN, finding, looks_at, module_seconds, phases, short, whole_seconds
from hookd.tool.reports.wording import moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hookd.wire.incident import Incident
    from hookd.wire.report import ModuleRow, Report

MAX_MODULES = 200
OPEN = 3
"""Number of incidents, the first ones, whose details are open; later ones are usually consequences."""
PHASES = ("data", "forward", "backward", "optimizer", "other")
BORN = ("nan", "inf")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML cells. A column whose name starts with `>` holds numbers, with `:` names."""
    classes = [{">": ' class="n"', ":": ' class="name"'}.get(name[:1], "") for name in head]
    names = "".join(
        f"<th{kind if name[:1] == '>' else ''}>{name.lstrip('>:')}</th>"
        for name, kind in zip(head, classes, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Return a table of facts; empty values are left out."""
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in pairs if value)
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def tiles(pairs: Iterable[tuple[str, object]]) -> str:
    """Return tiles for the most important numbers."""
    return (
        '<ul class="tiles">' + "".join(f"<li><b>{text(v)}</b><span>{text(k)}</span></li>" for k, v in pairs) + "</ul>"
    )


# ---- incidents


def incidents(rows: Sequence[Incident]) -> Iterator[str]:
    """Yield a card for each incident, with all recorded details."""
    if not rows:
        yield '<p class="good">None.</p>'
    for n, row in enumerate(rows):
        yield incident(row, is_first=n < OPEN)


def incident(row: Incident, *, is_first: bool) -> str:
    """Return the card of one incident, from a target's page or from `detail` in the store."""
    number = f"#{row['id']} " if row.get("id") is not None else ""
    when = moment(row["time"]) if isinstance(row.get("time"), (int, float)) else ""
    where = ", ".join(f"{name} {row[name]}" for name in ("module", "step") if row.get(name) not in (None, ""))
    details = "".join(_details(row))
    return (
        f'<div class="card{" first" if row.get("kind") in BORN else ""}"><p><span class="kind">{text(row.get("kind"))}</span>'
        f'<span class="soft">{text(number)}{when}{" · " if where else ""}{text(where)}</span></p>'
        f"<p>{text(row.get('message') or row.get('kind'))}{text(wording.repeated(row))}</p>"
        + (f"<details{' open' if is_first else ''}><summary>details</summary>{details}</details>" if details else "")
        + "</div>"
    )


def _details(row: Incident) -> Iterator[str]:
    """Show short values as facts, lists of like objects as tables, everything else as JSON."""
    rest = {key: value for key, value in row.items() if key not in (*SHOWN, "id") and value not in (None, [], {})}
    brief = {key: shown for key, value in rest.items() if (shown := short(value))}
    yield facts((_words(key), value) for key, value in brief.items())
    for key, value in rest.items():
        if key in brief:
            continue
        yield f"<h3>{text(_words(key))}</h3>"
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            yield "<pre>" + "\n".join(text(part) for part in value) + "</pre>"
        elif isinstance(value, list) and all(isinstance(part, dict) for part in value):
            yield _records(value)
        elif isinstance(value, dict) and not any(isinstance(part, (dict, list)) for part in value.values()):
            yield facts(value.items())
        else:
            yield "<pre>" + text(json.dumps(wording.finite(value), indent=2)) + "</pre>"


def _records(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table of a recorder's entries, such as calls or steps."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = [f":{text(name)}" if name == "module" else f">{text(_words(name))}" for name in names]
    return table(head, [[_cell(row.get(name)) for name in names] for row in rows])


def _cell(value: object) -> str:
    return wording.number(value) if isinstance(value, float) else "" if value is None else text(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def marks(report: Report) -> list[plots.Mark]:
    """Return the marks of incidents on the curve, whose steps are counted from the attach."""
    offset = report["step"]["offset"] or 0
    drawn = []
    for row in report["incidents"]:
        step = row.get("step")
        if isinstance(step, int):
            counted = step - (offset if row.get("is_step_absolute", report["step"]["is_absolute"]) else 0)
            drawn.append(plots.Mark(counted, f"{row.get('kind')}: {row.get('message')}"))
    return drawn


# ---- a target's numbers


def curve(report: Report) -> Iterator[str]:
    """Yield the chart of the last step times, and its notes."""
    points = report.get("curve") or []
    yield plots.step_times([plots.Curve("median", 0, points)], marks(report))
    beyond, longest = plots.cut_off(points)
    notes = ["the line shows the median of the steps per point, a bar above it the longest of them"]
    if beyond:
        notes.append(f"at {beyond} points the longest is cut off, {wording.seconds(longest)} at most")
    if points:
        last, offset = points[-1], report["step"]["offset"]
        notes.append("steps are counted from the attach" + (f", at step {offset} of the run" if offset else ""))
        notes.append(f"the last one ended at {moment(last['time'])}")
        yield f'<p class="soft">{text("; ".join(notes))}.</p>'


def phase_shares(report: Report, step_s: float | None) -> Iterator[str]:
    """Yield a bar of the phases of a step, and its legend."""
    shares = sorted(phases(report), key=lambda share: PHASES.index(share[0]) if share[0] in PHASES else len(PHASES))
    if not shares:
        yield '<p class="soft">The plugin timing is not loaded, or has not sampled a step yet.</p>'
        return
    parts = [
        (name, share, COLOURS if name == "other" else n % COLOURS) for n, (name, share) in enumerate(shares) if share
    ]
    yield plots.shares(parts)
    legend = (
        f'<li><i class="c{colour}"></i>{text(name)} {wording.percent(share)}'
        + (f' <span class="soft">{wording.seconds(share * step_s)}</span>' if step_s else "")
        + "</li>"
        for name, share, colour in parts
    )
    yield f'<ul class="legend">{"".join(legend)}</ul>'


def modules(report: Report, limit: int = MAX_MODULES) -> Iterator[str]:
    """Yield a table of the costliest modules and those with a finding, in the order of the model."""
    rows = report["modules"]
    costliest = {id(row) for row in sorted(rows, key=module_seconds, reverse=True)[:limit]}
    shown = [row for row in rows if id(row) in costliest or finding(row)][: 2 * limit]
    whole = whole_seconds(rows)
    if len(shown) < len(rows):
        yield f'<p class="soft">The {len(shown)} costliest of {len(rows)}.</p>'
    head = (":module", "type", ">calls", ">forward", ">backward", ">share", "", ">mean", ">std", ">min", ">max",
            ">zeros", "finding")  # fmt: skip
    cells = [_module(row, whole) for row in shown]
    used = [n for n in range(len(head)) if n == 0 or any(row[n] not in ("-", "") for row in cells)]
    yield table([head[n] for n in used], [[row[n] for n in used] for row in cells])


def _module(row: ModuleRow, whole: float) -> list[str]:
    timing, seen = row["metrics"].get("timing", {}), row["metrics"].get("activations", {})
    calls, back = timing.get("forward_calls") or 0, timing.get("backward_calls") or 0
    share = module_seconds(row) / whole if whole and calls else None
    trouble = finding(row)
    return [
        text(row["name"] or "(loss)"),
        text(row["type"]),
        f"{calls:.0f}" if calls else "-",
        wording.seconds((timing.get("forward_seconds") or 0) / calls) if calls else "-",
        wording.seconds((timing.get("backward_seconds") or 0) / back) if back else "-",
        wording.percent(share),
        plots.bar(share) if share is not None else "",
        *(wording.number(seen.get(name)) for name in ("mean", "std", "min", "max")),
        wording.percent(seen.get("zero_ratio")),
        f'<span class="bad">{text(trouble)}</span>' if trouble else "",
    ]


def plugins(report: Report) -> str:
    """Return a table of the plugins: sampling, cost and settings."""
    rows = [
        [
            text(plugin["name"]),
            text(plugin["state"] or "-"),
            text(looks_at(plugin)),
            f"{plugin['errors'] or 0:.0f}",
            wording.seconds(plugin["overhead_seconds"]),
            text(", ".join(f"{key}={value}" for key, value in (plugin.get("settings") or plugin["options"]).items())),
        ]
        for plugin in report["plugins"]
    ]
    return table((":plugin", "state", "looks at", ">errors", ">time spent", "settings"), rows)


def threads(report: Report) -> str:
    """Return a table of the threads' positions, now or at the end."""
    rows = [
        [
            text(thread["name"]),
            text(thread["tid"]),
            text(thread["phase"]),
            text(thread["module"] or "-"),
            text(thread["step"]),
        ]
        for thread in report["threads"]
    ]
    return table(("thread", ">id", "phase", ":module", ">step"), rows)


def logs(report: Report) -> str:
    """Return the last lines of the agent's log."""
    lines = [
        time.strftime("%H:%M:%S ", time.localtime(line["time"])) + text(line.get("message", line))
        for line in report["logs"]
    ]
    return f"<pre>{chr(10).join(lines)}</pre>" if lines else '<p class="soft">Nothing.</p>'
