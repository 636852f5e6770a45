"""A report as a small table, for a notebook or a terminal."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from hookd.tool.reports.reading import (
    call_seconds,
    calls,
    finding,
    model_seconds,
    module_seconds,
    notable,
    step_seconds,
)
from hookd.tool.reports.wording import percent, plain, seconds, shorten

if TYPE_CHECKING:
    from hookd.wire.report import ModuleRow, Report

SHOWN = 10
"""Number of costliest modules that are shown; modules with a finding are shown too."""
INCIDENTS = 5
"""Number of incidents that are shown, the latest ones."""
COLUMNS = ("MODULE", "TYPE", "CALLS", "FORWARD", "BACKWARD", "SHARE", "FINDING")
NUMBERS = range(2, 6)
NAME_WIDTH, TEXT_WIDTH = 40, 120
STYLES = ("text-align:left", "text-align:right;font-variant-numeric:tabular-nums")


class Table:
    """Table of a report; IPython shows it as HTML or text, depending on its front end.

    Args:
        report: as `hookd.read` returns it. Its names and messages are untrusted text.
    """

    def __init__(self, report: Report) -> None:
        self._heading = _heading(report)
        self._rows = _rows(report["modules"])
        self._incidents = [
            shorten(plain(str(row.get("message") or row.get("kind"))), TEXT_WIDTH)
            for row in report["incidents"][-INCIDENTS:]
        ]

    def __repr__(self) -> str:
        table = [COLUMNS, *self._rows] if self._rows else []
        widths = [max(len(row[n]) for row in table) for n in range(len(COLUMNS))] if table else []
        aligned = (
            "  ".join(f"{cell:{'>' if n in NUMBERS else '<'}{widths[n]}}" for n, cell in enumerate(row))
            for row in table
        )
        return "\n".join(
            [self._heading, *(f"! {text}" for text in self._incidents), *(line.rstrip() for line in aligned)]
        )

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape(text)}</li>" for text in self._incidents)
        rows = "".join(_html("td", row) for row in self._rows)
        table = f"<table><thead>{_html('th', COLUMNS)}</thead><tbody>{rows}</tbody></table>" if rows else ""
        return f"<div><p>{escape(self._heading)}</p>{f'<ul>{items}</ul>' if items else ''}{table}</div>"


def _html(tag: str, cells: tuple[str, ...]) -> str:
    styled = ((STYLES[n in NUMBERS], escape(cell)) for n, cell in enumerate(cells))
    return "<tr>" + "".join(f'<{tag} style="{style}">{cell}</{tag}>' for style, cell in styled) + "</tr>"


def _heading(report: Report) -> str:
    ratio = report["overhead"]["ratio"]
    cost = f"hookd takes {percent(ratio)}" if ratio is not None else "hookd's cost not yet known"
    count = len(report["incidents"])
    incidents = f"{count} incident{'' if count == 1 else 's'}"
    each = seconds(step_seconds(report))
    return f"hookd: {plain(str(report['state']))}, {report['step']['text']}, {each} a step, {cost}, {incidents}"


def _rows(modules: list[ModuleRow]) -> list[tuple[str, ...]]:
    """Return the rows in the order of the model."""
    model_s = model_seconds(modules)
    return [_row(row, model_s) for row in notable(modules, SHOWN)[: 2 * SHOWN]]


def _row(row: ModuleRow, model_s: float) -> tuple[str, ...]:
    count = calls(row)
    return (
        shorten(plain(row["name"]), NAME_WIDTH) or "(loss)",
        shorten(plain(row["type"]), NAME_WIDTH),
        f"{count:.0f}" if count else "-",
        seconds(call_seconds(row, "forward")),
        seconds(call_seconds(row, "backward")),
        percent(module_seconds(row) / model_s) if model_s and count else "-",
        plain(finding(row)),
    )
