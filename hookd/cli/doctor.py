"""`hookd doctor`: why attaching works here or not, and what mends it."""

from __future__ import annotations

import click

from hookd.cli import options, output

MARKS = {"ok": "✓", "note": "·", "bad": "✗"}


@click.command()
@click.argument("pid", type=options.Pid(), required=False)
@options.host
@options.json
def doctor(*, pid: int | None, host: str | None, as_json: bool) -> int:
    """Say why attaching works here or not, for one process if PID is given, and the command that mends it.

    Exit code 1 if something is in the way.
    """
    from hookd.cli import checks

    found = [*checks.of_machine(host), *(checks.of_target(pid) if pid else ())]
    bad = [check for check in found if check.state == "bad"]
    if as_json:
        output.emit({"ok": not bad, "checks": [check.__dict__ for check in found]})
        return int(bool(bad))
    table = output.fill(
        output.table("", "CHECK", "FOUND"), [(MARKS[check.state], check.name, check.found) for check in found]
    )
    output.show(table)
    for check in found:
        if check.cure:
            click.echo(f"\n{check.name}: {check.cure}")
    click.echo("\nSomething is in the way." if bad else "\nNothing is in the way.")
    return int(bool(bad))
