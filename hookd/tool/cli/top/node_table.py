"""The table of all targets, or of the ranks of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from hookd.tool.cli import options, output
from hookd.tool.cli.top.cells import safe
from hookd.tool.cli.top.table import Column, Table
from hookd.tool.reports.reading import is_called_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hookd.tool.cli.outputs import TopRow
    from hookd.tool.cli.top.target import Target


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def size(value: float) -> str:
    """Format a number of bytes: 1.2G."""
    for unit in "BKMGT":
        if value < 999.5 or unit == "T":
            return f"{value:.0f}{unit}" if unit == "B" or value >= 99.5 else f"{value:.3g}{unit}"
        value /= 1024
    raise AssertionError


def _state(state: str) -> str:
    """Format a state for a narrow column: SIGKILL, not `signal SIGKILL`."""
    return safe(state.removeprefix("signal "))


COLUMNS = {
    "pid": Column("PID", 7, 1, is_falling=False),
    "run": Column("RUN", 10, 0, safe, is_right=False, is_falling=False),
    "rank": Column("RANK", 4, 2, lambda rank: safe(str(rank)), is_falling=False),
    "user": Column("USER", 6, 6, safe, is_right=False, is_falling=False),
    "state": Column("STATE", 8, 3, _state, is_right=False, is_falling=False),
    "step": Column("STEP", 8, 4),
    "steps_per_s": Column("STEP/S", 6, 5, _rate),
    "step_s": Column("A STEP", 7, 6, output.seconds),
    "overhead_ratio": Column("COST", 6, 8, output.percent),
    "rss_bytes": Column("RSS", 5, 10, size),
    "loss": Column("LOSS", 8, 7, output.number),
    "incidents": Column("INC", 3, 5),
    "lately": Column("STEPS LATELY", 16, 11, is_falling=False),
    "why": Column("WHY", 20, 12, safe, is_right=False, is_falling=False, takes_rest=True),
}
"""By the key in `--json`, which has no history, and `message` for `why`. A terminal of 80 columns has room for all but the last two."""
WIDEST_RUN = 40
"""The width that a column of runs may wish for."""
LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = {"hangs": "bold red", "waits": "yellow", "paused": "yellow", "corrupt": "red", "protocol": "red"}


def build(targets: Sequence[Target]) -> Table:
    """Return a table of the targets as of their last reading."""
    rows = [_row(target) for target in targets]
    values: dict[str, Sequence[Any]] = {key: [row[key] for row in rows] for key in COLUMNS}
    columns = {key: column for key, column in COLUMNS.items() if _has_any(key, values[key])}
    longest = max((len(target.run) for target in targets), default=0)
    columns["run"] = replace(columns["run"], wish=min(longest, WIDEST_RUN))
    return Table(
        columns=columns,
        values=values,
        names=[(target.pid, target.start) for target in targets],
        texts=[f"{target.pid} {target.run} {_rank(target)} {target.state} {target.script}".lower()
               for target in targets],
        detail=lambda at: _detail(targets[at]),
        styles={at: style for at, target in enumerate(targets) if (style := _style(target))},
    )  # fmt: skip


def listed(targets: Sequence[Target], run: str | None = None) -> list[Target]:
    """Return the targets of a run, or all, sorted by run and rank."""
    selected = [target for target in targets if run in (None, target.run)]
    return sorted(
        selected,
        key=lambda target: (
            target.run,
            _rank(target) if isinstance(_rank(target), int) else -1,
            target.rank,
            target.pid,
        ),
    )


def _rank(target: Target) -> int | str:
    number = options.number(target.rank)
    return target.rank if number is None else number


def _has_any(key: str, values: Sequence[Any]) -> bool:
    """Whether a column is shown; LOSS is hidden if no plugin publishes it."""
    return key != "loss" or any(value == value for value in values)  # noqa: PLR0124  NaN


def _row(target: Target) -> dict[str, str | float | None]:
    return {
        "pid": target.pid,
        "run": target.run,
        "rank": _rank(target),
        "user": target.user,
        "state": target.state,
        "step": target.step["current"],
        "steps_per_s": target.steps_per_s,
        "step_s": target.step_s,
        "overhead_ratio": target.value("hookd_overhead_ratio"),
        "rss_bytes": target.rss,
        "loss": target.loss,
        "incidents": target.incidents,
        "lately": sparkline(target.lately),
        "why": target.message,
    }


def sparkline(values: Iterable[float]) -> str:
    """Draw numbers as a line of bars, from 0 to the largest; NaN is a blank."""
    known = list(values)
    top = max((value for value in known if math.isfinite(value)), default=0.0)
    return "".join(_bar(value / top) if top > 0 and math.isfinite(value) else " " for value in known)


def _bar(share: float) -> str:
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


def as_json(targets: Sequence[Target]) -> list[TopRow]:
    """Return the rows that `--json` prints; unknown numbers are null."""
    return [_as_json(target) for target in targets]


def _as_json(target: Target) -> TopRow:
    row = {key: value for key, value in _row(target).items() if key not in ("lately", "why")}
    known = {key: None if value != value else value for key, value in row.items()}  # noqa: PLR0124  NaN
    more = {"rank": target.rank, "is_absolute": target.step["is_absolute"], "message": target.message or None}
    return cast("TopRow", {**known, **more})


def _style(target: Target) -> str:
    return "dim" if target.ended else _STYLES.get(target.state, "red" if target.incidents else "")


def _detail(target: Target) -> str:
    is_whole = target.step["is_absolute"] or is_called_only(target.step)
    star = "" if is_whole else "; steps are counted from the attach"
    return safe(target.message) or f"{safe(target.script)}{star}"
