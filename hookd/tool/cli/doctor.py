"""`hookd doctor`: whether attaching works here, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output

if TYPE_CHECKING:
    from hookd.tool.cli.outputs import Checks

SYMBOLS = {"ok": "✓", "note": "·", "bad": "✗"}


@click.command(short_help="Check whether attaching works here, and how to fix it.")
@click.argument("pid", type=options.Pid(), required=False)
@options.host
@options.json
def doctor(*, pid: int | None, host: str | None, as_json: bool) -> int:
    """Check whether attaching works here, to one process if PID is given, and name the commands that fix problems.

    Exit code 1 if there is a problem.
    """
    from hookd.tool.cli import checks, target_checks

    of_machine = list(checks.of_machine(host))
    results = [*of_machine, *(target_checks.of_target(pid, host) if pid else ())]
    bad = [check for check in results if check.state == "bad"]
    if as_json:
        data: Checks = {"ok": not bad, "checks": [check.as_json() for check in results]}
        output.emit(data)
        return int(bool(bad))
    # With a PID, the passed checks of the machine share one line: all checks have to fit on one screen.
    fine = [check for check in of_machine if check.state == "ok"] if pid else []
    if fine:
        names = ", ".join(check.name for check in fine)
        summary = checks.Check("this machine", "ok", f"nothing is wrong with {names}")
        results = [summary, *(check for check in results if check not in fine)]
    for line in target_checks.shown(results, SYMBOLS):
        click.echo(line)
    click.echo(
        "Something is in the way of an attach: see the lines with ✗." if bad else "Nothing is in the way of an attach."
    )
    return int(bool(bad))
