"""`hookd ps`: the training processes of this machine."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from hookd.tool.cli import options, output, targets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hookd.tool.attach.discover import Candidate

COMMAND_WIDTH = 70


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that are passed over (workers, launchers…).")
@options.user
@options.json
def ps(*, everything: bool, user: int | None, as_json: bool) -> None:
    """List training processes: attached, attachable, or why not."""
    from hookd.tool.attach.discover import LAUNCHER, candidates

    every = [one for one in candidates() if user in (None, one.uid)]
    found = [one for one in every if everything or one.state != "skipped"]
    launchers = {one.pid for one in every if one.why == LAUNCHER}
    rows = [_row(one, launchers) for one in sorted(found, key=lambda one: (one.state, one.pid))]
    if as_json:
        output.emit({"processes": rows})
        return
    if not rows:
        for line in _nothing(every, user):
            output.say(line)
        return
    has_notes = any(_note(row) for row in rows)
    table = output.table(">PID", "STATE", "USER", ">AGE", "COMMAND", *["NOTE"] * has_notes)
    output.show(output.fill(table, [_cells(row, has_notes=has_notes) for row in rows]))


def _nothing(every: Sequence[Candidate], user: int | None) -> Iterator[str]:
    """Say that there is nothing to attach to, and what was passed over."""
    from hookd.tool.linux.owner import user_name

    whose = "" if user is None else f" of user {user_name(user)}"
    if not every:
        yield f"no Python process with torch{whose} is running here that you may see"
        return
    yield f"no process{whose} can be attached to; `hookd ps --all` lists what was skipped:"
    yield from targets.told_skipped({"pid": one.pid, "why": one.why} for one in every)


def _note(row: dict[str, Any]) -> str:
    """Say why not, or what `hookd attach --tree` wants to be told."""
    return row["why"] or (f"a rank of {row['launcher']} (--tree)" if row["launcher"] else "")


def _row(one: Candidate, launchers: Collection[int]) -> dict[str, Any]:
    from hookd.tool.attach import discover, process_tree
    from hookd.tool.linux.owner import user_name

    return {
        "pid": one.pid,
        "state": one.state,
        "why": one.why,
        "uid": one.uid,
        "user": user_name(one.uid),
        "age_s": round(discover.age_s(one.start), 1),
        "cmdline": list(one.cmdline),
        "launcher": next((above for above in process_tree.above(one.pid) if above in launchers), None),
    }


def _cells(row: dict[str, Any], *, has_notes: bool) -> tuple[str, ...]:
    return (
        str(row["pid"]),
        row["state"],
        row["user"],
        output.span(row["age_s"]),
        command(row["cmdline"], COMMAND_WIDTH),
        *[_note(row)] * has_notes,
    )


def command(cmdline: Sequence[str], width: int) -> str:
    """Write a command line so that what tells one job from another is seen: the script's name and its arguments."""
    from hookd.tool.linux import commandline

    first, *rest = cmdline or [""]
    words = [first if set(first) & set(" :") else PurePath(first).name, *rest]  # else a title that it has given itself
    script, _ = commandline.program(cmdline)
    if len(" ".join(words)) > width and "/" in script and script in rest:
        words[1 + rest.index(script)] = f"…/{PurePath(script).name}"
    text = " ".join(" ".join(words).split())
    return text if len(text) <= width else text[: width - 1] + "…"
