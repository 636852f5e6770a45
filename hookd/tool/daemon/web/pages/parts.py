"""Parts of the report: incidents, phases, modules, plugins."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages import plots
from hookd.tool.daemon.web.pages.html import Markup, join, table, tag
from hookd.tool.daemon.web.pages.plots import COLOURS
from hookd.tool.reports import wording
from hookd.tool.reports.reading import (
    SHOWN,
    call_seconds,
    calls,
    finding,
    inference_share,
    looks_at,
    model_seconds,
    module_seconds,
    notable,
    phases,
    short,
)
from hookd.tool.reports.wording import moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hookd.wire.incident import Incident
    from hookd.wire.report import ModuleRow, Report

MAX_MODULES = 200
OPEN = 3
"""Number of incidents, the first ones, whose details are open; later ones are usually consequences."""
PHASES = ("data", "forward", "backward", "collectives", "optimizer", "other")
BORN = ("nan", "inf")
HIDDEN = ("place", "model", "is_step_absolute", "is_absolute")
"""Fields by which the daemon tells places and models apart, and what is said with the number of the step."""
UNITS = ("s", "bytes")
TIMES = ("time", "last_seen")
WHOLE = 1e15
"""A whole number below this is written with all of its digits."""
_EMPTY: tuple[object, ...] = (None, "", [], {})


def facts(pairs: Iterable[tuple[str, object]]) -> Markup | None:
    """Return a table of facts; empty values are left out. None if no value is left."""
    rows = [tag("tr", tag("th", name), tag("td", value)) for name, value in pairs if value]
    return tag("table", tag("tbody", *rows), class_="facts") if rows else None


def tiles(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Return tiles for the most important numbers."""
    return tag("ul", *(tag("li", tag("b", value), tag("span", name)) for name, value in pairs), class_="tiles")


# ---- incidents


def incidents(rows: Sequence[Incident]) -> Iterator[Markup]:
    """Yield a card for each incident, with all recorded details."""
    if not rows:
        yield tag("p", "None.", class_="good")
    for n, row in enumerate(rows):
        yield incident(row, is_first=n < OPEN)


def incident(row: Incident, *, is_first: bool) -> Markup:
    """Return the card of one incident, from a target's page or from `detail` in the store."""
    number = f"#{row['id']} " if row.get("id") is not None else ""
    when = moment(row["time"]) if isinstance(row.get("time"), (int, float)) else ""
    where = ", ".join(f"{name} {row[name]}" for name in ("module", "step") if row.get(name) not in (None, ""))
    soft = f"{number}{when}{' · ' if where else ''}{where}"
    made = join(*details(row))
    return tag(
        "div",
        tag("p", tag("span", row.get("kind"), class_="kind"), tag("span", soft, class_="soft")),
        tag("p", row.get("message") or row.get("kind"), wording.repeated(row)),
        tag("details", tag("summary", "details"), made, open=is_first) if made else None,
        class_="card first" if row.get("kind") in BORN else "card",
    )


def details(row: Incident) -> Iterator[Markup | None]:
    """Show short values as facts, lists of like objects as tables, everything else as facts within facts."""
    hidden = (*SHOWN, *HIDDEN, "id")
    rest = {key: value for key, value in row.items() if key not in hidden and value not in _EMPTY}
    brief = {key: shown for key, value in rest.items() if (shown := short(value))}
    yield facts((_words(key), _cell(key, rest[key])) for key in brief)
    for key, value in rest.items():
        if key in brief:
            continue
        yield tag("h3", _words(key))
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            yield tag("pre", *[part for line in value for part in (line, "\n")][:-1])
        elif isinstance(value, list) and all(isinstance(part, dict) for part in value):
            yield _records(_words(key), value)
        elif isinstance(value, dict):
            yield facts((_words(str(name)), _cell(str(name), one)) for name, one in value.items())
        else:
            yield tag("pre", json.dumps(wording.finite(value), indent=2))


def _records(caption: str, rows: Sequence[Mapping[str, object]]) -> Markup:
    """Return a table of a recorder's entries, such as calls or steps, without columns that are empty."""
    every = dict.fromkeys(name for row in rows for name in row if name not in HIDDEN)
    names = [name for name in every if any(row.get(name) not in _EMPTY for row in rows)]
    head = [f":{name}" if name == "module" else f">{_words(name)}" for name in names]
    return table(caption, head, [[_cell(name, row.get(name)) for name in names] for row in rows])


def _cell(name: str, value: object) -> str:
    """Return a recorded value as people write it; times are Unix seconds."""
    if value in _EMPTY:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_words(str(key))}: {_cell(str(key), one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_cell(name, one) for one in value)
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) < WHOLE
        return moment(value) if name in TIMES else f"{value:,.0f}" if is_whole else wording.number(value)
    return f"{value:,}" if isinstance(value, int) and name != "tid" else str(value)


def _words(name: str) -> str:
    """Return the name of a field in words; a unit at its end is in parentheses."""
    unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), None)
    words = name.replace("_", " ")
    return words if unit is None else f"{words.removesuffix(unit)}({unit})"


def events(report: Report) -> list[plots.Event]:
    """Return the incidents to be drawn on the curve, whose steps are counted from the attach."""
    offset = report["step"]["offset"] or 0
    drawn = []
    for row in report["incidents"]:
        step = row.get("step")
        if isinstance(step, int):
            counted = step - (offset if row.get("is_step_absolute", report["step"]["is_absolute"]) else 0)
            drawn.append(plots.Event(counted, f"{row.get('kind')}: {row.get('message')}"))
    return drawn


# ---- a target's numbers


def curve(report: Report) -> Iterator[Markup]:
    """Yield the chart of the last step times, and its notes."""
    points = report.get("curve") or []
    yield plots.step_times([plots.Curve("median", 0, points)], events(report))
    beyond, longest = plots.cut_off(points)
    notes = ["the line shows the median of the steps per point, a bar above it the longest of them"]
    if beyond:
        notes.append(f"at {beyond} points the longest is cut off, {wording.seconds(longest)} at most")
    if points:
        last, offset = points[-1], report["step"]["offset"]
        notes.append("steps are counted from the attach" + (f", at step {offset} of the run" if offset else ""))
        notes.append(f"the last one ended at {moment(last['time'])}")
        yield tag("p", "; ".join(notes), ".", class_="soft")


def phase_shares(report: Report, step_s: float | None) -> Iterator[Markup]:
    """Yield a bar of the phases of a step, and its legend."""
    shares = sorted(phases(report), key=lambda share: PHASES.index(share[0]) if share[0] in PHASES else len(PHASES))
    if not shares:
        yield tag("p", "The plugin timing is not loaded, or has not sampled a step yet.", class_="soft")
        return
    parts = [
        (name, share, COLOURS if name == "other" else n % COLOURS) for n, (name, share) in enumerate(shares) if share
    ]
    yield plots.shares(parts)
    legend = (
        tag(
            "li",
            tag("i", class_=f"c{colour}"),
            f"{name} {wording.percent(share)}",
            join(" ", tag("span", wording.seconds(share * step_s), class_="soft")) if step_s else None,
        )
        for name, share, colour in parts
    )
    yield tag("ul", *legend, class_="legend")
    if share := inference_share(report):
        yield tag(
            "p", f"Inference takes {wording.percent(share)} of the time, and is not part of a step.", class_="soft"
        )


def modules(report: Report, limit: int = MAX_MODULES) -> Iterator[Markup]:
    """Yield a table of the costliest modules and those with a finding, in the order of the model."""
    rows = report["modules"]
    shown = notable(rows, limit)[: 2 * limit]
    whole = model_seconds(rows)
    if len(shown) < len(rows):
        yield tag("p", f"The {len(shown)} costliest of {len(rows)}.", class_="soft")
    head = (":module", "type", ">calls", ">forward", ">backward", ">inference", ">share", "", ">mean", ">std", ">min", ">max",
            ">zeros", "finding")  # fmt: skip
    cells = [_module(row, whole) for row in shown]
    used = [n for n in range(len(head)) if n == 0 or any(row[n] not in ("-", "") for row in cells)]
    yield table("Modules", [head[n] for n in used], [[row[n] for n in used] for row in cells])


def _module(row: ModuleRow, whole: float) -> list[str]:
    seen, count = row["metrics"].get("activations", {}), calls(row)
    share = module_seconds(row) / whole if whole and count else None
    found = finding(row)
    return [
        row["name"] or "(loss)",
        row["type"],
        f"{count:.0f}" if count else "-",
        *(wording.seconds(call_seconds(row, kind)) for kind in ("forward", "backward", "inference")),
        wording.percent(share),
        plots.bar(share) if share is not None else "",
        *(wording.number(seen.get(name)) for name in ("mean", "std", "min", "max")),
        wording.percent(seen.get("zero_ratio")),
        tag("span", found, class_="bad") if found else "",
    ]


def plugins(report: Report) -> Markup:
    """Return a table of the plugins: sampling, cost and settings."""
    rows = [
        [
            plugin["name"],
            plugin["state"] or "-",
            looks_at(plugin),
            f"{plugin['errors'] or 0:.0f}",
            wording.seconds(plugin["overhead_seconds"]),
            ", ".join(f"{key}={value}" for key, value in (plugin.get("settings") or plugin["options"]).items()),
        ]
        for plugin in report["plugins"]
    ]
    return table("Plugins", (":plugin", "state", "looks at", ">errors", ">time spent", "settings"), rows)


def threads(report: Report) -> Markup:
    """Return a table of the threads' positions, now or at the end."""
    rows = [
        [thread["name"], thread["tid"], thread["phase"], thread["module"] or "-", thread["step"]]
        for thread in report["threads"]
    ]
    return table("Threads", ("thread", ">id", "phase", ":module", ">step"), rows)


def logs(report: Report) -> Markup:
    """Return the last lines of the agent's log."""
    lines = [
        join(time.strftime("%H:%M:%S ", time.localtime(line["time"])), line.get("message", line), "\n")
        for line in report["logs"]
    ]
    return tag("pre", *lines) if lines else tag("p", "Nothing.", class_="soft")
