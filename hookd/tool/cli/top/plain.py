"""Print one table, or JSON, of one interval: `hookd top` without a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len

from hookd.tool.cli import output
from hookd.tool.cli.top import node_table
from hookd.tool.cli.top.cells import fit
from hookd.tool.cli.top.module_table import ModuleTable
from hookd.tool.cli.top.table import fitting
from hookd.tool.cli.top.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.top.node import Node

GAP = "  "


def show(node: Node, pid: int | None, run: str | None, interval_s: float, *, as_json: bool) -> None:
    """Read twice, one interval apart, and print the result.

    Args:
        node: the targets.
        pid: of the target whose modules are shown; None to show targets.
        run: label of the run to which the list is restricted.
        interval_s: seconds between the two readings.
        as_json: whether to print JSON.
    """
    modules = ModuleTable()
    opened = next((target for target in node.targets if target.pid == pid), None)
    for is_last in (False, True):
        node.read(time.monotonic())
        if opened is not None and opened.snapshot is not None:
            modules.take(opened.read_at, opened.snapshot)
        if not is_last:
            time.sleep(interval_s)
    if opened is not None and opened.error is not None:
        raise opened.error
    listed = node_table.listed(node.targets, run)
    if as_json and opened is not None:
        output.emit({**node_table.as_json([opened])[0], "modules": modules.as_json()})
    elif as_json:
        output.emit(node_table.as_json(listed))
    elif opened is not None or listed:
        view = View(node_table.build(listed), "run") if opened is None else View(modules.build(), "share")
        for line in lines(view, output.columns() if sys.stdout.isatty() else None):
            click.echo(line)
    else:
        output.say("no process is attached; `hookd ps` lists those that can be")


def lines(view: View, width: int | None) -> Iterator[str]:
    """Yield all rows, fitted to `width` columns, or at full width for None."""
    columns = view.table.columns
    cells = {key: [view.table.cell(row, key) for row in view.order] for key in columns}
    if width is None:
        widths = {key: max(map(cell_len, [columns[key].title, *cells[key]])) for key in columns}
    else:
        widths = fitting(columns, width - len(columns) * (len(GAP) - 1))
    yield _joined({key: columns[key].title for key in widths}, widths, view)
    for at in range(len(view.order)):
        yield _joined({key: cells[key][at] for key in widths}, widths, view)


def _joined(cells: dict[str, str], widths: dict[str, int], view: View) -> str:
    columns = view.table.columns
    return GAP.join(fit(cells[key], width, is_right=columns[key].is_right) for key, width in widths.items()).rstrip()
