"""`hookd incidents`: recorded incidents, including those of exited processes."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import select
import sys
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookd.errors import DaemonNotRunning, DaemonSilent
from hookd.tool.cli import options, output, stored, subject, targets
from hookd.tool.linux.owner import user_name
from hookd.tool.reports.wording import moment, repeated
from hookd.wire import labels
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hookd.tool.cli.outputs import Incidents
    from hookd.wire.incident import IncidentRow

POLL_S = 1.0
KIND_WIDTH, WHO_WIDTH = 10, 40
"""Least width of the column of kinds, and largest of that of runs and processes."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class Filter:
    """Conditions that listed incidents must satisfy, as `rows.query` takes them; None allows any value.

    Attributes:
        user: uid of the owner.
        since: Unix seconds.
    """

    run: str | None
    user: int | None
    pid: int | None
    kind: str | None
    since: float | None


class Since(click.ParamType):  # type: ignore[type-arg]
    """A time: a span before now, or a date and time."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ARG002
        """Return the time in Unix seconds."""
        if isinstance(value, float):
            return value
        if match := _SPAN.match(value):
            return time.time() - float(match[1]) * _UNITS[match[2]]
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError) as exc:
            raise click.UsageError(
                f"'{value}' is not a time; write 90s, 30m, 2h, 7d or 2026-01-31T12:00.", ctx
            ) from exc


@click.command(short_help="List incidents, the newest last.")
@click.option("-f", "--follow", is_flag=True, help="Print new incidents as they occur, until Ctrl-C.")
@click.option("--run", metavar="RUN", help="List incidents of this run only.")
@options.user
@click.option("--pid", type=options.Pid(), help="List incidents of this process only.")
@click.option("--kind", metavar="KIND", help="List incidents of this kind only, such as nan, hang or lost.")
@click.option("--since", type=Since(), metavar="TIME", help="Not older than 90s, 30m, 2h, 7d, or a moment.")
@click.option("-n", "--limit", type=click.IntRange(0, 1000), default=50, show_default=True, metavar="N",
              help="Print the last N incidents.")  # fmt: skip
@click.option("--state-dir", type=click.Path(path_type=Path), help="Read the file in this directory, not the daemon's.")
@options.host
@options.json
def incidents(
    *, follow: bool, limit: int, state_dir: Path | None, host: str | None, as_json: bool, **conditions: Any
) -> None:
    """List incidents, in the order in which hookd learned of them: the newest last.

    They come from the daemon, or from its file if no daemon answers. While a run is watched, --run selects the run of
    its user, else the runs of this name of all users.
    """
    client = targets.reader(host)
    chosen = Filter(**conditions)
    if chosen.run is not None and chosen.user is None and state_dir is None:
        chosen = replace(chosen, user=subject.run_user(chosen.run, client))
        _say_of_others(stored.rows(client, run=chosen.run), chosen)
    # Before the list: an incident that comes meanwhile is either in the list or followed.
    known = stored.rows(client, state_dir, order="id") if follow else []
    rows = stored.rows(client, state_dir, limit=limit, order="id", **vars(chosen))[::-1]
    if as_json and not follow:
        data: Incidents = {"incidents": rows}
        output.emit(data)
        return
    show(rows, as_json=as_json, has_header=not follow)
    if not rows and not follow:
        output.say(_nothing(stored.rows(client, state_dir, order="id"), chosen))
    if follow:
        after = max((row["id"] or 0 for row in rows or known), default=0)
        _follow(host, state_dir, after, chosen, as_json=as_json)


def _say_of_others(every: Iterable[IncidentRow], chosen: Filter) -> None:
    """Print whose run is listed, and which other users have incidents under its name."""
    if chosen.user is None:
        return
    others = sorted({user_name(row["owner"]) or "?" for row in every if row["owner"] != chosen.user})
    if others:
        output.say(
            f"these are incidents of user {user_name(chosen.user)}; {', '.join(others)} had a run {chosen.run} too: --user lists those"
        )


def _nothing(every: list[IncidentRow], chosen: Filter) -> str:
    """Return the message for an empty list; for an unknown run or kind it suggests known ones."""
    runs, kinds = dict.fromkeys(row["run"] for row in every), dict.fromkeys(row["kind"] for row in every)
    for what, word, known in (("run", chosen.run, runs), ("kind", chosen.kind, kinds)):
        if every and word is not None and not labels.called(known, word):
            near = difflib.get_close_matches(word, known, targets.SUGGESTED) or list(known)[: targets.SUGGESTED]
            return f"no incidents of {what} '{word}'; there are incidents of {', '.join(map(output.plain, near))}"
    return "no incidents"


def _pause() -> None:
    """Wait for the polling interval.

    Raises:
        BrokenPipeError: nobody reads our output any more.
    """
    waiting = select.poll()
    waiting.register(sys.stdout.fileno(), 0)  # POLLERR and POLLHUP are always reported
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(POLL_S * 1000)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _follow(host: str | None, state_dir: Path | None, after: int, chosen: Filter, *, as_json: bool) -> None:
    """Print new incidents; wait for a daemon that stops or hangs to answer again."""
    was_there = True
    while True:
        _pause()
        try:
            rows = stored.rows(targets.daemon(host), state_dir, after=after, **vars(chosen))
        except (DaemonNotRunning, DaemonSilent) as error:
            if was_there:
                output.say(f"{error.message}; waiting for it")
            was_there = False
            continue
        was_there = True
        show(rows, as_json=as_json)
        after = (rows[-1]["id"] if rows else None) or after


def show(rows: Sequence[IncidentRow], *, as_json: bool, has_header: bool = False) -> None:
    """Print one line per incident, its columns below each other, and flush: a reader may be waiting."""
    kind_width = max([KIND_WIDTH, *(len(one_line(row["kind"])) for row in rows)])
    who_width = min(WHO_WIDTH, max([0, *(len(_who(row)) for row in rows)]))
    if rows and has_header and not as_json:
        who = "RUN/RANK (PROCESS)"
        who_width = max(who_width, len(who))
        click.echo(f"{'ID':>5}  {'TIME':<19}  {'KIND':<{kind_width}}  {who:<{who_width}}  WHAT")
    for row in rows:
        if as_json:
            click.echo(json.dumps(output.finite(row)))
        else:
            text = line(row, kind_width, who_width)
            click.echo(output.wrap(text, " " * 7) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def line(row: IncidentRow, kind_width: int = KIND_WIDTH, who_width: int = 0) -> str:
    """Format an incident as one line without terminal control sequences.

    The line has its number, time, kind, run and rank, process, owner and message.
    """
    number = "-" if row["id"] is None else f"#{row['id']}"
    head = f"{number:>5}  {moment(row['time'])}  {one_line(row['kind']):<{kind_width}}"
    return f"{head}  {_who(row):<{who_width}}  {one_line(row['message'])}{repeated(row)}"


def _who(row: IncidentRow) -> str:
    whose = f" of {one_line(row['user'])}" if row.get("user") else ""
    return f"{one_line(row['run'])}/{one_line(row['rank'])} ({row['pid']}{whose})"
