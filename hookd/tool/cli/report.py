"""`hookd report`: all about one target, for a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import PageError
from hookd.tool.cli import options, output, targets
from hookd.tool.cli.status import hang, ongoing
from hookd.tool.reports.reading import (
    finding,
    looks_at,
    module_seconds,
    paused,
    phases,
    state,
    step_seconds,
    whole_seconds,
)
from hookd.tool.reports.wording import moment, repeated
from hookd.wire.module_names import above

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from hookd.tool.cli.subject import Subject

STATISTICS = ("mean", "std", "min", "max")
TIMES = ("TYPE", ">CALLS", ">FORWARD", ">BACKWARD", ">SHARE")
VALUES = (*(f">{name.upper()}" for name in STATISTICS), ">ZEROS")
NAME_WIDTH, TYPE_WIDTH, COLUMN_WIDTH = 24, 16, 10
"""Characters: what a table of 80 has for a name, a type and a number."""
WIDE = 130
"""Columns that one table of all takes."""


@click.command(short_help="Show what one target, or the ranks of a run, are doing.")
@click.argument("word", metavar="PID|RUN|#ID")
@click.option("-n", "--modules", "limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N",
              help="Show the N costliest modules, and any with a finding.")  # fmt: skip
@click.option("-a", "--all", "everything", is_flag=True, help="Show every module.")
@click.option("--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Write one HTML page that needs nothing else.")  # fmt: skip
@options.user
@options.host
@options.json
def report(
    *, word: str, limit: int, everything: bool, html: Path | None, user: int | None, host: str | None, as_json: bool
) -> None:
    """Show what one target is doing: phases, modules, activations, incidents, plugins.

    A RUN shows its ranks beside each other; where several users have one of that name, --user says whose is meant. '#12',
    in quotes, is an incident, by its number in `hookd incidents`.
    """
    from hookd.tool.cli import subject

    found = subject.find(word, targets.reader(host), user)
    if html is not None:
        from hookd.tool.cli.html import document

        document.write(html, found)
        output.say(f"{html} holds the report")
    if as_json:
        output.emit(found.as_json())
    elif html is None:
        _show(found, None if everything else limit)


def _show(found: Subject, limit: int | None) -> None:
    from hookd.tool.cli import run_report

    if found.kind == "target":
        _show_target(found.reports[0], limit)
    elif found.kind == "run":
        if found.reports:
            click.echo(f"run {output.plain(found.name)} of user {run_report.owners(found.reports)}")
            output.show(run_report.ranks(found.reports))
            click.echo()
        else:
            output.say(f"no rank of run {found.name}{found.whose} is watched any more")
        for line in run_report.incidents(found.rows):
            click.echo(line)
    else:
        for line in run_report.incident(found.rows[0]):
            click.echo(output.wrap(line, " " * 4))


def _show_target(found: dict[str, Any], limit: int | None) -> None:
    if "identity" not in found:
        raise PageError(f"the page of process {found['pid']} cannot be trusted", reason="corrupt")
    for line in heading(found):
        click.echo(output.wrap(line))
    for table in modules(found, limit) if found["modules"] else ():
        click.echo()
        output.show(table)
    click.echo()
    for line in incidents(found):
        click.echo(output.wrap(line, " " * 12))
    click.echo()
    output.show(plugins(found))


def heading(found: dict[str, Any]) -> Iterator[str]:
    """Say in a few lines who the target is, where it stands and where its time goes."""
    identity, target = found["identity"], found.get("target", {})
    run, rank = target.get("run", identity.get("run")), target.get("rank", identity.get("rank"))
    since = clock(identity.get("attached"))
    yield f"{identity.get('script') or '(no script)'}: run {run}, rank {rank}{of_world(identity)}, {of_user(found)}"
    yield f"Python {identity.get('python')}, torch {identity.get('torch')}; watched since {since} ({identity.get('method')})"
    overhead = found["overhead"]["ratio"]
    cost = f"of which hookd takes {output.percent(overhead)}" if overhead is not None else "hookd's cost not yet known"
    how = f" ({target['reason']})" if target.get("reason") else ""
    yield f"{state(found)}{how}, {found['step']['text']}, {output.seconds(step_seconds(found))} a step, {cost}"
    if target.get("how"):
        yield f"it {target['how']}"
    if why := paused(found):
        yield why
    if stuck := target.get("hang"):
        yield hang(stuck)
        yield f"told when it was found: {stuck['message']}"
    yield from ongoing(target.get("ongoing", {}))
    if dropped := target.get("series_dropped"):
        from hookd.tool.daemon.metrics.selection import told

        yield told(dropped)
    if shares := phases(found):
        yield "a step is " + ", ".join(f"{output.percent(share)} {phase}" for phase, share in shares)
    seen = {state: count for state, count in found["observed"].items() if count}
    if seen:
        yield "modules: " + ", ".join(f"{count:.0f} {state.replace('_', ' ')}" for state, count in seen.items())


def of_user(found: dict[str, Any]) -> str:
    """Name the process of a report and the user to whom it belongs."""
    owner = targets.owner(found)
    return f"process {found['pid']}" + (f" of user {owner}" if owner else "")


def of_world(identity: dict[str, Any]) -> str:
    """Say of how many ranks it is one, ` of 4`; nothing of one alone. The number is the target's word."""
    size = identity.get("world_size")
    return f" of {size}" if isinstance(size, int) and size > 1 else ""


def clock(unix_s: object) -> str:
    """Write the hour of a time that a target says."""
    return moment(unix_s).rpartition(" ")[2] if isinstance(unix_s, (int, float)) else "-"


def modules(found: dict[str, Any], limit: int | None) -> Iterator[Table | str]:
    """Tabulate the modules: time of one call, share of the model's time, and what their outputs are like.

    One table where there is room for it, else two and the findings as lines.
    """
    rows = _chosen(found["modules"], limit)
    left_out = len(found["modules"]) - len(rows)
    title = f"the {len(rows)} costliest of {len(found['modules'])} modules; --all shows all" if left_out else None
    whole = whole_seconds(found["modules"])
    findings = [finding(row) for row in rows]
    if output.columns() >= WIDE:
        cells = [(*_times(*pair, whole), *_statistics(pair[1]), finding(pair[1])) for pair in _labelled(rows)]
        yield _filled(("MODULE", *TIMES, *VALUES, "FINDING"), cells, title)
        return
    yield _narrow(("MODULE", *TIMES), [_times(*pair, whole) for pair in _labelled(rows)], title)
    looked_at = [row for row in rows if set(_statistics(row)) != {"-"}]
    if looked_at:
        yield _narrow(("OUTPUTS OF", *VALUES), [(label, *_statistics(row)) for label, row in _labelled(looked_at)])
    if any(findings):
        told = zip(rows, findings, strict=True)
        yield "\n".join(output.wrap(f"{row['name']}: {what}") for row, what in told if what)


def _narrow(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Fill a table for a narrow terminal: the names have what the other columns leave."""
    columns, rows = _with_numbers(columns, rows)
    taken = sum(TYPE_WIDTH if column == "TYPE" else COLUMN_WIDTH for column in columns[1:])
    room = max(NAME_WIDTH, output.columns() - taken)
    short = [(output.shorten(row[0], room), *(output.shorten(cell, TYPE_WIDTH) for cell in row[1:])) for row in rows]
    return output.fill(output.table(*columns, title=title), short)


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    columns, rows = _with_numbers(columns, rows)
    return output.fill(output.table(*columns, title=title), rows)


def _with_numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns in which nothing stands: those of plugins that are not loaded."""
    kept = [0, *(n for n in range(1, len(columns)) if any(row[n] not in ("-", "") for row in rows))]
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _labelled(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Give each row with the name to show, indented below what it is part of: whole where its own parent is not shown."""
    indents: dict[str, int] = {}
    labelled = []
    for row in rows:
        name = row["name"]
        parents = above(name)
        shown = next((one for one in parents if one in indents), None)
        indents[name] = 0 if shown is None else indents[shown] + 1
        label = name if shown is None or shown != parents[0] else name.rpartition(".")[2]
        labelled.append(("  " * indents[name] + (label or "(loss)"), row))
    return labelled


def _chosen(rows: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    if limit is None or len(rows) <= limit:
        return rows
    costliest = sorted(rows, key=module_seconds, reverse=True)[:limit]
    names = {row["name"] for row in costliest} | {row["name"] for row in rows if finding(row)}
    return [row for row in rows if row["name"] in names]


def _times(label: str, row: dict[str, Any], whole: float) -> tuple[str, ...]:
    timing = row["metrics"].get("timing", {})
    calls = timing.get("forward_calls") or 0
    return (
        label,
        row["type"],
        f"{calls:.0f}" if calls else "-",
        output.seconds(timing["forward_seconds"] / calls) if calls else "-",
        output.seconds(timing["backward_seconds"] / timing["backward_calls"]) if timing.get("backward_calls") else "-",
        output.percent(module_seconds(row) / whole) if whole and calls else "-",
    )


def _statistics(row: dict[str, Any]) -> tuple[str, ...]:
    statistics = row["metrics"].get("activations", {})
    zeros = statistics.get("zero_ratio")
    return (*(output.number(statistics.get(name)) for name in STATISTICS), output.percent(zeros))


def _state(plugin: dict[str, Any]) -> str:
    if plugin["state"] != "active" or plugin.get("changes_training") is None:
        return plugin["state"] or "-"
    return "changes training" if plugin["changes_training"] else "dry run"


def incidents(found: dict[str, Any]) -> Iterator[str]:
    """Give a line for each incident, as it was told."""
    elsewhere = found.get("elsewhere", [])
    yield "incidents:" if found["incidents"] else f"incidents: none{' of this rank' if elsewhere else ''}"
    for incident in found["incidents"]:
        when = clock(incident.get("time"))
        yield f"  {when}  {incident.get('message') or incident.get('kind')}{repeated(incident)}"
        if "no_bundle" in incident:
            yield f"  {'':8}  no bundle: {incident['no_bundle']}"
    for one in elsewhere:
        more = f" and {one['incidents'] - 1} before" if one["incidents"] > 1 else ""
        yield f"  of rank {one['rank']} (process {one['pid']}): {one['message']}{more}"


def plugins(found: dict[str, Any]) -> Table:
    """Tabulate the plugins: state, how often they look, what they cost; and what hookd itself does."""
    table = output.table("PLUGIN", "STATE", "LOOKS AT", ">ERRORS", ">TIME SPENT")
    rows = []
    for one in found["plugins"]:
        spent = output.seconds(one["overhead_seconds"])
        rows.append((one["name"], _state(one), looks_at(one), f"{one['errors'] or 0:.0f}", spent))
    own = found["overhead"].get("own_seconds")
    if own is not None:
        rows.append(("hookd itself", "-", "-", "-", output.seconds(own)))
    return output.fill(table, rows)
