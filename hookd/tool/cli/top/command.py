"""`hookd top`: the command."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from hookd.tool.cli import options, output, targets

if TYPE_CHECKING:
    from hookd.tool.cli.top.node import Node


@click.command(short_help="Show a live view of targets and their modules, like top.")
@click.argument("word", metavar="[PID|RUN]", required=False)
@click.option("-d", "--interval", "interval_s", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
              metavar="S", help="Seconds between refreshes.")  # fmt: skip
@click.option(
    "--once", is_flag=True, help="Print one table, of one interval, and exit; the default without a terminal."
)
@options.user
@options.host
@options.json
def top(*, word: str | None, interval_s: float, once: bool, user: int | None, host: str | None, as_json: bool) -> int:
    """Show a live view of all targets.

    With a PID, show the modules of that target; with a RUN, show its ranks. Press h for the list of keys. The numbers are
    read from shared memory, without a request to the target, so watching costs the training nothing.
    """
    from hookd.tool.cli.top import plain
    from hookd.tool.cli.top.node import Node

    node = Node(targets.reader(host), user)
    node.read(time.monotonic())
    try:
        pid, run = node.of(word) if word else (None, None)
        if as_json or once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            plain.show(node, pid, run, interval_s, as_json=as_json)
            return 0
        return _live(node, pid, run, interval_s)
    finally:
        node.close()


def _live(node: Node, pid: int | None, run: str | None, interval_s: float) -> int:
    from hookd.tool.cli.top import app, plain, terminal
    from hookd.tool.cli.top.state import State

    if terminal.is_dumb():
        output.say(
            "this terminal (TERM) cannot move its cursor: a table is printed at each interval; press Ctrl-C to quit"
        )
        while True:
            plain.show(node, pid, run, interval_s, as_json=False)
            click.echo()
    return app.run(State(node, interval_s, pid=pid, run=run))
