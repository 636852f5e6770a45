"""`hookd ps`: list the training processes of this machine."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, TypedDict

import click

from hookd.tool.cli import options, output, targets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hookd.tool.attach.discover import Candidate
    from hookd.tool.cli.outputs import Processes

COMMAND_WIDTH = 70


class ProcessRow(TypedDict):
    """A process, as `hookd ps --json` prints it."""

    pid: int
    state: str
    """`attached`, `attachable` or `skipped`."""
    why: str
    """Why it is skipped; empty if it is not."""
    uid: int
    user: str
    """The name of that user."""
    age_s: float
    """Seconds since its start."""
    cmdline: list[str]
    """Words of its command line."""
    launcher: int | None
    """Pid of the launcher that started it, for `hookd attach --tree`; None if there is none."""


@click.command(short_help="List training processes; can hookd attach to them?")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="Also list skipped processes, such as workers and launchers."
)
@options.user
@options.json
def ps(*, everything: bool, user: int | None, as_json: bool) -> None:
    """List training processes, and whether hookd can attach to each.

    The state of a process is attached, attachable or skipped; a note gives the reason why it is skipped.
    """
    from hookd.tool.attach.discover import LAUNCHER, candidates

    processes = [process for process in candidates() if user in (None, process.uid)]
    listed = [process for process in processes if everything or process.state != "skipped"]
    launchers = {process.pid for process in processes if process.why == LAUNCHER}
    rows = [_row(process, launchers) for process in sorted(listed, key=lambda process: (process.state, process.pid))]
    if as_json:
        data: Processes = {"processes": rows}
        output.emit(data)
        return
    if not rows:
        for line in _nothing(processes, user):
            output.say(line)
        return
    has_notes = any(_note(row) for row in rows)
    table = output.table(">PID", "STATE", "USER", ">AGE", "COMMAND", *["NOTE"] * has_notes)
    output.show(output.fill(table, [_cells(row, has_notes=has_notes) for row in rows]))


def _nothing(processes: Sequence[Candidate], user: int | None) -> Iterator[str]:
    """Yield the message for an empty list, and the skipped processes with the reasons."""
    from hookd.tool.linux.owner import user_name

    whose = "" if user is None else f" of user {user_name(user)}"
    if not processes:
        yield f"no process{whose} that is visible to you has loaded torch; `hookd doctor` says whose processes hookd may enter"
        return
    yield f"no process{whose} can be attached to; these were skipped:"
    yield from targets.skipped_lines(map(targets.skipped, processes))


def _note(row: ProcessRow) -> str:
    """Return why a process is skipped, or else the launcher whose pid `hookd attach --tree` needs."""
    return row["why"] or (f"a rank of {row['launcher']} (--tree)" if row["launcher"] else "")


def _row(process: Candidate, launchers: Collection[int]) -> ProcessRow:
    from hookd.tool.attach import discover, process_tree
    from hookd.tool.linux.owner import user_name

    return {
        "pid": process.pid,
        "state": process.state,
        "why": process.why,
        "uid": process.uid,
        "user": user_name(process.uid),
        "age_s": round(discover.age_s(process.start), 1),
        "cmdline": list(process.cmdline),
        "launcher": next((parent for parent in process_tree.above(process.pid) if parent in launchers), None),
    }


def _cells(row: ProcessRow, *, has_notes: bool) -> tuple[str, ...]:
    return (
        str(row["pid"]),
        row["state"],
        row["user"],
        output.span(row["age_s"]),
        command(row["cmdline"], COMMAND_WIDTH),
        *[_note(row)] * has_notes,
    )


def command(cmdline: Sequence[str], width: int) -> str:
    """Format a command line in at most `width` characters.

    The script's name and its arguments are kept, because they distinguish jobs; directories are shortened first.
    """
    from hookd.tool.linux import commandline

    first, *rest = cmdline or [""]
    # A first word with a blank or a colon is not a path but a title that the process has set, such as "ray::run /a/b".
    words = [first if set(first) & set(" :") else PurePath(first).name, *rest]
    script, _ = commandline.program(cmdline)
    if len(" ".join(words)) > width and "/" in script and script in rest:
        words[1 + rest.index(script)] = f"…/{PurePath(script).name}"
    text = " ".join(" ".join(words).split())
    return text if len(text) <= width else text[: width - 1] + "…"
