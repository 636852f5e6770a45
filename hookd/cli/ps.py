"""`hookd ps`: the training processes of this machine."""

from __future__ import annotations

import pwd
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from hookd.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.attach.discover import Candidate

COMMAND_WIDTH = 70


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that are passed over (workers, launchers…).")
@options.json
def ps(*, everything: bool, as_json: bool) -> None:
    """List training processes: attached, attachable, or why not."""
    from hookd.attach.discover import candidates

    found = [one for one in candidates() if everything or one.state != "skipped"]
    rows = [_row(one) for one in sorted(found, key=lambda one: (one.state, one.pid))]
    if as_json:
        output.emit({"processes": rows})
        return
    if not rows:
        output.say("no Python process with torch is running here that you may see")
        return
    has_notes = any(row["why"] for row in rows)
    table = output.table(">PID", "STATE", "USER", ">AGE", "COMMAND", *["NOTE"] * has_notes)
    output.show(output.fill(table, [_cells(row, has_notes=has_notes) for row in rows]))


def _row(one: Candidate) -> dict[str, Any]:
    from hookd.attach import discover

    return {
        "pid": one.pid,
        "state": one.state,
        "why": one.why,
        "uid": one.uid,
        "age_s": round(discover.age_s(one.start), 1),
        "cmdline": list(one.cmdline),
    }


def _cells(row: dict[str, Any], *, has_notes: bool) -> tuple[str, ...]:
    return (
        str(row["pid"]),
        row["state"],
        user(row["uid"]),
        output.span(row["age_s"]),
        command(row["cmdline"], COMMAND_WIDTH),
        *[row["why"] or ""] * has_notes,
    )


def command(cmdline: Sequence[str], width: int) -> str:
    """Write a command line so that what tells one job from another is seen: the script's name and its arguments."""
    from hookd.attach import commandline

    first, *rest = cmdline or [""]
    words = [first if set(first) & set(" :") else PurePath(first).name, *rest]  # else a title that it has given itself
    script, _ = commandline.program(cmdline)
    if len(" ".join(words)) > width and "/" in script and script in rest:
        words[1 + rest.index(script)] = f"…/{PurePath(script).name}"
    text = " ".join(" ".join(words).split())
    return text if len(text) <= width else text[: width - 1] + "…"


def user(uid: int) -> str:
    """Give the name of a user, or the number where it has none (a container's)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
