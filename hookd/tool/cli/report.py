"""`hookd report`: describe one target, run or incident for a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output, targets
from hookd.tool.cli.status import ongoing
from hookd.tool.reports.reading import (
    backwards,
    call_seconds,
    calls,
    finding,
    inference_share,
    learning,
    looks_at,
    loss,
    model_seconds,
    module_seconds,
    notable,
    paused,
    phases,
    run_and_rank,
    state,
    step_seconds,
    waiting_in,
)
from hookd.tool.reports.wording import hang_words, moment, repeated
from hookd.wire.module_names import described, names_above

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from hookd.tool.cli.subject import Subject
    from hookd.wire.identity import Identity
    from hookd.wire.report import ModuleRow, PluginRow, Report

STATISTICS = ("mean", "std", "min", "max")
TIMES = ("TYPE", ">CALLS", ">FORWARD", ">BACKWARD", ">INFERENCE", ">SHARE")
VALUES = (*(f">{name.upper()}" for name in STATISTICS), ">ZEROS")
NAME_WIDTH, TYPE_WIDTH, COLUMN_WIDTH = 24, 16, 10
"""Characters of a name, a type and a number in a table of 80 columns."""
WAITING = 0.3
"""Share of a step from which on waiting is its main cost."""
OUTSIDE = 0.5
"""Share of a step from which on code that hookd has no name for is its main cost."""
WIDE = 130
"""Columns of the terminal from which all numbers are shown in one table."""
SHOWN_LOSSES = 4
"""Losses of a step that plugin `activations` publishes; there may be more backwards."""


@click.command(short_help="Show the state of one target, or of the ranks of a run.")
@click.argument("word", metavar="PID|RUN|#ID")
@click.option("-n", "--modules", "limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="N",
              help="Show the N costliest modules, and any with a finding.")  # fmt: skip
@click.option("-a", "--all", "everything", is_flag=True, help="Show every module.")
@click.option("--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
              help="Write the report as one self-contained HTML page.")  # fmt: skip
@options.user
@options.host
@options.json
def report(
    *, word: str, limit: int, everything: bool, html: Path | None, user: int | None, host: str | None, as_json: bool
) -> None:
    """Show the state of one target: phases, modules, activations, incidents, plugins.

    With a RUN, compare its ranks; if several users have a run of that name, select one with --user. With '#12', in
    quotes, show that incident, by its number in `hookd incidents`.
    """
    from hookd.tool.cli import subject

    chosen = subject.find(word, targets.reader(host), user)
    if html is not None:
        from hookd.tool.cli.html import document

        document.write(html, chosen)
        output.say(f"report written to {html}")
    if as_json:
        output.emit(chosen.as_json())
    elif html is None:
        _show(chosen, None if everything else limit)


def _show(chosen: Subject, limit: int | None) -> None:
    from hookd.tool.cli import run_report

    if chosen.kind == "target":
        _show_target(chosen.reports[0], limit)
    elif chosen.kind == "run":
        if chosen.reports:
            click.echo(f"run {output.plain(chosen.name)} of user {run_report.owners(chosen.reports)}")
            output.show(run_report.ranks(chosen.reports))
            click.echo()
        else:
            output.say(f"no rank of run {chosen.name}{chosen.whose} is watched any more")
        for line in run_report.incidents(chosen.rows):
            click.echo(line)
    else:
        for line in run_report.incident(chosen.rows[0]):
            click.echo(output.wrap(line, " " * 4))


def _show_target(report: Report, limit: int | None) -> None:
    for line in heading(report):
        click.echo(output.wrap(line))
    for table in modules(report, limit) if report["modules"] else ():
        click.echo()
        output.show(table)
    click.echo()
    for line in incidents(report):
        click.echo(output.wrap(line, " " * 12))
    click.echo()
    output.show(plugins(report))


def heading(report: Report) -> Iterator[str]:
    """Yield lines on the target's identity, its progress, and the phases of its steps."""
    identity, target = report["identity"], report.get("target", {})
    run, rank = run_and_rank(report)
    since = clock(identity.get("attached"))
    yield f"{identity.get('script') or '(no script)'}: run {run}, rank {rank}{of_world(identity)}, {of_user(report)}"
    yield f"Python {identity.get('python')}, torch {identity.get('torch')}; watched since {since} ({identity.get('method')})"
    overhead = report["overhead"]["ratio"]
    cost = (
        f"of which hookd takes {output.percent(overhead)}" if overhead is not None else "hookd's cost is not yet known"
    )
    now, reason = state(report), target.get("reason")
    how = f" ({reason})" if reason and reason not in (now, "exited") else ""
    each, at = output.seconds(step_seconds(report)), loss(report)
    count = backwards(report)
    of = f" in the first of {count}{' or more' * (count >= SHOWN_LOSSES)} backwards" if count > 1 else ""
    value = f"loss {output.number(at)}{of}, " if at is not None else ""
    yield f"{now}{how}, {report['step']['text']}, {value}{each} a step, {cost}"
    if how_it_learns := learning(report):
        yield ", ".join(how_it_learns) + " (at the last sampled step)"
    if target.get("how"):
        yield f"it {target['how']}"
    if why := paused(report):
        yield why
    if stuck := target.get("hang"):
        yield hang_words(stuck)
        yield f"first reported as: {stuck['message']}"
    yield from ongoing(target.get("ongoing", {}))
    if dropped := target.get("series_dropped"):
        from hookd.tool.daemon.metrics.selection import left_out

        yield left_out(dropped)
    yield from _of_a_step(report)
    seen = {state: count for state, count in report["observed"].items() if count}
    if seen:
        yield "modules: " + ", ".join(f"{count:.0f} {state.replace('_', ' ')}" for state, count in seen.items())


def _of_a_step(report: Report) -> Iterator[str]:
    """Yield lines on the phases of a step, and on what they mean."""
    shares = dict(phases(report))
    if shares:
        waits = waiting_in(report)
        more = f"; ranks wait for each other in the {' and '.join(waits)} as well" if waits else ""
        yield "a step is " + ", ".join(f"{output.percent(share)} {phase}" for phase, share in shares.items()) + more
    if shares.get("data", 0.0) >= WAITING:
        yield f"the input is the bottleneck: {output.percent(shares['data'])} of a step waits for a DataLoader; give it more workers"
    if shares.get("collectives", 0.0) >= WAITING:
        yield f"{output.percent(shares['collectives'])} of a step waits for other ranks; `hookd incidents` names a rank that is slow"
    if shares.get("other", 0.0) >= OUTSIDE:
        yield (
            f"{output.percent(shares['other'])} of a step is code between the model, the backward, the optimizer and the DataLoader; "
            f"`hookd stack {report['pid']}`, a few times, shows where"
        )
    if share := inference_share(report):
        yield f"inference takes {output.percent(share)} of the time, and is not part of a step"


def of_user(report: Report) -> str:
    """Return the name of a report's process and of its user."""
    owner = targets.owner(report)
    return f"process {report['pid']}" + (f" of user {owner}" if owner else "")


def of_world(identity: Identity) -> str:
    """Return the world size as ` of 4`, "" for a single rank.

    The target supplies the number, so its type is checked.
    """
    size = identity.get("world_size")
    return f" of {size}" if isinstance(size, int) and size > 1 else ""


def clock(unix_s: object) -> str:
    """Format the time of day; "-" if the value, which the target supplies, is not a number."""
    return moment(unix_s).rpartition(" ")[2] if isinstance(unix_s, (int, float)) else "-"


def modules(report: Report, limit: int | None) -> Iterator[Table | str]:
    """Yield tables of the modules: time of one call, share of the model's time, statistics of the outputs.

    A wide terminal gets one table, a narrow one two tables and the findings as lines.
    """
    rows = report["modules"] if limit is None else notable(report["modules"], limit)
    left_out = len(report["modules"]) - len(rows)
    title = f"the {len(rows)} costliest of {len(report['modules'])} modules; --all shows all" if left_out else None
    model_s = model_seconds(report["modules"])
    findings = [finding(row) for row in rows]
    if output.columns() >= WIDE:
        cells = [(*_times(*pair, model_s), *_statistics(pair[1]), finding(pair[1])) for pair in _labelled(rows)]
        yield _filled(("MODULE", *TIMES, *VALUES, "FINDING"), cells, title)
        return
    modules = [row for row in rows if row["name"] or row["type"]]  # the others are losses that no module computes
    yield _narrow(("MODULE", *TIMES), [_times(*pair, model_s) for pair in _labelled(modules)], title)
    looked_at = [row for row in rows if set(_statistics(row)) != {"-"}]
    if looked_at:
        yield _narrow(("OUTPUTS OF", *VALUES), [(label, *_statistics(row)) for label, row in _labelled(looked_at)])
    if any(findings):
        named = zip(rows, findings, strict=True)
        yield "\n".join(
            output.wrap(f"{described(row['name'], row['type']) or '(loss)'}: {text}") for row, text in named if text
        )


def _narrow(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> Table:
    """Return a table for a narrow terminal, in which names get the width that the other columns leave."""
    columns, rows = _with_numbers(columns, rows)
    taken = sum(TYPE_WIDTH if column == "TYPE" else COLUMN_WIDTH for column in columns[1:])
    room = max(NAME_WIDTH, output.columns() - taken)
    short = [(output.shorten(row[0], room), *(output.shorten(cell, TYPE_WIDTH) for cell in row[1:])) for row in rows]
    return output.fill(output.table(*columns, title=title), short)


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    columns, rows = _with_numbers(columns, rows)
    return output.fill(output.table(*columns, title=title), rows)


def _with_numbers(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows without empty columns, such as those of plugins that are not loaded."""
    kept = [0, *(n for n in range(1, len(columns)) if any(row[n] not in ("-", "") for row in rows))]
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _labelled(rows: Sequence[ModuleRow]) -> list[tuple[str, ModuleRow]]:
    """Return each row with its label: the name, indented below the nearest ancestor that is shown.

    The name is shortened to its last part only if the direct parent is shown.
    """
    indents: dict[str, int] = {}
    labelled = []
    for row in rows:
        name = row["name"]
        parents = names_above(name)
        shown = next((parent for parent in parents if parent in indents), None)
        indents[name] = 0 if shown is None else indents[shown] + 1
        label = name if shown is None or shown != parents[0] else name.rpartition(".")[2]
        labelled.append(("  " * indents[name] + (label or "(loss)"), row))
    return labelled


def _times(label: str, row: ModuleRow, model_s: float) -> tuple[str, ...]:
    count = calls(row)
    return (
        label,
        row["type"],
        f"{count:.0f}" if count else "-",
        *(output.seconds(call_seconds(row, kind)) for kind in ("forward", "backward", "inference")),
        output.percent(module_seconds(row) / model_s) if model_s and count else "-",
    )


def _statistics(row: ModuleRow) -> tuple[str, ...]:
    statistics = row["metrics"].get("activations", {})
    zeros = statistics.get("zero_ratio")
    return (*(output.number(statistics.get(name)) for name in STATISTICS), output.percent(zeros))


def _state(plugin: PluginRow) -> str:
    if plugin["state"] != "active" or plugin.get("changes_training") is None:
        return plugin["state"] or "-"
    return "changes training" if plugin["changes_training"] else "dry run"


def incidents(report: Report) -> Iterator[str]:
    """Yield a line for each incident, as it was reported, and for the incidents of other ranks."""
    elsewhere = report.get("elsewhere", [])
    yield "incidents:" if report["incidents"] else f"incidents: none{' of this rank' if elsewhere else ''}"
    for incident in report["incidents"]:
        when = clock(incident.get("time"))
        yield f"  {when}  {incident.get('message') or incident.get('kind')}{repeated(incident)}"
    for row in elsewhere:
        more = f" and {row['incidents'] - 1} earlier" if row["incidents"] > 1 else ""
        yield f"  of rank {row['rank']} (process {row['pid']}): {row['message']}{more}"


def plugins(report: Report) -> Table:
    """Return a table of the plugins: state, sampling, errors and cost; and of the cost of hookd itself."""
    table = output.table("PLUGIN", "STATE", "SAMPLING", ">ERRORS", ">TIME SPENT")
    rows = []
    for plugin in report["plugins"]:
        spent = output.seconds(plugin["overhead_seconds"])
        rows.append((plugin["name"], _state(plugin), looks_at(plugin), f"{plugin['errors'] or 0:.0f}", spent))
    own = report["overhead"].get("own_seconds")
    if own is not None:
        rows.append(("hookd itself", "-", "-", "-", output.seconds(own)))
    return output.fill(table, rows)
