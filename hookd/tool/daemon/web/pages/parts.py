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


def incidents(told: Sequence[Incident]) -> Iterator[str]:
    """Yield a card for each incident, with all recorded details."""
    if not told:
        yield '<p class="good">None.</p>'
    for n, one in enumerate(told):
        yield incident(one, is_first=n < OPEN)


def incident(one: Incident, *, is_first: bool) -> str:
    """Return the card of one incident, from a target's page or from `detail` in the store."""
    number = f"#{one['id']} " if one.get("id") is not None else ""
    when = moment(one["time"]) if isinstance(one.get("time"), (int, float)) else ""
    where = ", ".join(f"{name} {one[name]}" for name in ("module", "step") if one.get(name) not in (None, ""))
    details = "".join(_details(one))
    return (
        f'<div class="card{" first" if one.get("kind") in BORN else ""}"><p><span class="kind">{text(one.get("kind"))}</span>'
        f'<span class="soft">{text(number)}{when}{" · " if where else ""}{text(where)}</span></p>'
        f"<p>{text(one.get('message') or one.get('kind'))}{text(wording.repeated(one))}</p>"
        + (f"<details{' open' if is_first else ''}><summary>details</summary>{details}</details>" if details else "")
        + "</div>"
    )


def _details(one: Incident) -> Iterator[str]:
    """Show short values as facts, lists of like objects as tables, everything else as JSON."""
    rest = {key: value for key, value in one.items() if key not in (*SHOWN, "id") and value not in (None, [], {})}
    brief = {key: told for key, value in rest.items() if (told := short(value))}
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
    found = []
    for one in report["incidents"]:
        step = one.get("step")
        if isinstance(step, int):
            counted = step - (offset if one.get("is_step_absolute", report["step"]["is_absolute"]) else 0)
            found.append(plots.Mark(counted, f"{one.get('kind')}: {one.get('message')}"))
    return found


# ---- a target's numbers


def curve(report: Report) -> Iterator[str]:
    """Yield the chart of the last step times, and its notes."""
    points = report.get("curve") or []
    yield plots.step_times([plots.Curve("median", 0, points)], marks(report))
    beyond, longest = plots.cut_off(points)
    told = ["the line shows the median of the steps per point, a bar above it the longest of them"]
    if beyond:
        told.append(f"at {beyond} points the longest is cut off, {wording.seconds(longest)} at most")
    if points:
        last, offset = points[-1], report["step"]["offset"]
        told.append("steps are counted from the attach" + (f", at step {offset} of the run" if offset else ""))
        told.append(f"the last one ended at {moment(last['time'])}")
        yield f'<p class="soft">{text("; ".join(told))}.</p>'


def phase_shares(report: Report, step_s: float | None) -> Iterator[str]:
    """Yield a bar of the phases of a step, and its legend."""
    found = sorted(phases(report), key=lambda one: PHASES.index(one[0]) if one[0] in PHASES else len(PHASES))
    if not found:
        yield '<p class="soft">The plugin timing is not loaded, or has not sampled a step yet.</p>'
        return
    parts = [
        (name, share, COLOURS if name == "other" else n % COLOURS) for n, (name, share) in enumerate(found) if share
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
    found = finding(row)
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
        f'<span class="bad">{text(found)}</span>' if found else "",
    ]


def plugins(report: Report) -> str:
    """Return a table of the plugins: sampling, cost and settings."""
    rows = [
        [
            text(one["name"]),
            text(one["state"] or "-"),
            text(looks_at(one)),
            f"{one['errors'] or 0:.0f}",
            wording.seconds(one["overhead_seconds"]),
            text(", ".join(f"{key}={value}" for key, value in (one.get("settings") or one["options"]).items())),
        ]
        for one in report["plugins"]
    ]
    return table((":plugin", "state", "looks at", ">errors", ">time spent", "settings"), rows)


def threads(report: Report) -> str:
    """Return a table of the threads' positions, now or at the end."""
    rows = [
        [text(one["name"]), text(one["tid"]), text(one["phase"]), text(one["module"] or "-"), text(one["step"])]
        for one in report["threads"]
    ]
    return table(("thread", ">id", "phase", ":module", ">step"), rows)


def logs(report: Report) -> str:
    """Return the last lines of the agent's log."""
    lines = [
        time.strftime("%H:%M:%S ", time.localtime(one["time"])) + text(one.get("message", one))
        for one in report["logs"]
    ]
    return f"<pre>{chr(10).join(lines)}</pre>" if lines else '<p class="soft">Nothing.</p>'
