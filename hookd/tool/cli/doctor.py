"""`hookd doctor`: why attaching works here or not, and what mends it."""

from __future__ import annotations

import click

from hookd.tool.cli import options, output

MARKS = {"ok": "✓", "note": "·", "bad": "✗"}


@click.command(short_help="Say why attaching works here or not, and what mends it.")
@click.argument("pid", type=options.Pid(), required=False)
@options.host
@options.json
def doctor(*, pid: int | None, host: str | None, as_json: bool) -> int:
    """Say why attaching works here or not, for one process if PID is given, and the command that mends it.

    Exit code 1 if something is in the way.
    """
    from hookd.tool.cli import checks, target_checks

    of_machine = list(checks.of_machine(host))
    found = [*of_machine, *(target_checks.of_target(pid, host) if pid else ())]
    bad = [check for check in found if check.state == "bad"]
    if as_json:
        output.emit({"ok": not bad, "checks": [check.__dict__ for check in found]})
        return int(bool(bad))
    # With a process to look at, what is fine with the machine takes one line: all has to go on one screen.
    fine = [check for check in of_machine if check.state == "ok"] if pid else []
    if fine:
        names = ", ".join(check.name for check in fine)
        summary = checks.Check("this machine", "ok", f"nothing is wrong with {names}")
        found = [summary, *(check for check in found if check not in fine)]
    for line in target_checks.shown(found, MARKS):
        click.echo(line)
    click.echo("Something is in the way." if bad else "Nothing is in the way.")
    return int(bool(bad))
