"""Rows of ranks, for the table of the first page and that of a run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.daemon.describe import target_row
from hookd.tool.daemon.fleet.history import Sample, step_now, steps_per_second
from hookd.tool.daemon.fleet.ranks import family, scalar
from hookd.tool.daemon.web.pages.health import Health
from hookd.tool.daemon.web.pages.html import Markup, address, link, tag
from hookd.tool.reports import wording
from hookd.tool.reports.reading import is_called_only

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hookd.tool.daemon.fleet.history import History
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.page import Snapshot
    from hookd.wire.target import TargetRow

SLOW = 1.1
"""A rank is slow above this multiple of the run's median step time."""


@dataclass(frozen=True)
class Rank:
    """A target as the pages show it.

    Attributes:
        row: its summary row, see `describe.target_row`.
        samples: its samples of the last minutes.
        health: how it is.
        cost: hookd's share of its time; None if unknown.
        budget: the share that it may take; None if unknown.
        changed_by: plugins that currently change its training.
    """

    target: Target
    row: TargetRow
    samples: Sequence[Sample]
    health: Health
    cost: float | None
    budget: float | None
    changed_by: Sequence[str]

    @classmethod
    def of(cls, target: Target, history: History) -> Rank:
        """Gather the known data of a target, without reading its page."""
        snapshot = target.last()
        is_alive, row = target.ended is None, target_row(target)
        return cls(
            target,
            row,
            history.of(target),
            Health.of(target, row),
            _share(snapshot, "hookd_overhead_ratio"),
            _share(snapshot, "hookd_overhead_budget_ratio"),
            _changing(snapshot) if snapshot is not None and is_alive else (),
        )

    @property
    def step_s(self) -> float | None:
        """The mean time of its last steps, in seconds."""
        return step_now(self.samples) if self.target.ended is None else None

    @property
    def rate(self) -> float | None:
        """Its steps per second."""
        return steps_per_second(self.samples) if self.target.ended is None else None

    @property
    def where(self) -> str:
        """The URL of the run's page with this rank selected."""
        return address("run", str(self.row["run"]), pid=self.row["pid"])


def _share(snapshot: Snapshot | None, name: str) -> float | None:
    ratio = math.nan if snapshot is None else scalar(snapshot, name)
    return ratio if 0 <= ratio < math.inf else None


def _changing(snapshot: Snapshot) -> Sequence[str]:
    """Return the active plugins that do change the training, not those that only could."""
    found = family(snapshot, "hookd_plugin_changes_training", ("plugin",))
    changing = (
        {} if found is None else {name: found.cells[at] for (name,), at in zip(found.values, found.first, strict=True)}
    )
    states = family(snapshot, "hookd_plugin_state", ("plugin", "state"))
    pairs = [] if states is None else list(zip(states.values, states.first, strict=True))
    active = {values[0] for values, at in pairs if states and values[1] == "active" and states.cells[at]}
    return sorted(name for name, value in changing.items() if value and name in active)


def order(rank: Rank) -> tuple[str, int, str, int]:
    """Return the sort key: run, then rank as a number."""
    name = str(rank.row["rank"])
    is_number = name.isascii() and name.isdecimal() and len(name) < 10
    return (str(rank.row["run"]), int(name) if is_number else 1 << 30, name, rank.row["pid"])


def worst_first(ranks: Iterable[Rank]) -> list[Rank]:
    """Sort by run and rank, the worst run first, and in each run the worst rank."""
    found = sorted(ranks, key=order)
    worst = {run: min(one.health.level for one in of_run) for run, of_run in itertools.groupby(found, _run)}
    return sorted(found, key=lambda rank: (worst[_run(rank)], _run(rank), rank.health.level))


def _run(rank: Rank) -> str:
    return str(rank.row["run"])


def numbers(rank: Rank) -> list[object]:
    """Return the cells of NUMBERS: step, steps per second, step time, cost."""
    step = rank.row["step"]
    is_whole = step is None or step["is_absolute"] or is_called_only(step)
    counted = None if step is None else tag(
        "span", f"{step['current']:,}" + ("" if is_whole else "*"), title=None if is_whole else "counted from the attach"
    )  # fmt: skip
    rate = rank.rate
    return [
        counted,
        "-" if rank.target.ended is not None else wording.number(rate),
        wording.seconds(rank.step_s),
        _cost(rank),
    ]


def _cost(rank: Rank) -> Markup | str:
    """Return the cost, coloured if it is above the budget."""
    told = wording.percent(rank.cost)
    if not rank.cost or not rank.budget or rank.cost <= rank.budget:
        return told
    return tag("span", told, class_="warn", title=f"above the budget of {wording.percent(rank.budget)}")


NUMBERS = (">step", ">steps/s", ">a step", ">hookd's cost")
"""Headings of the cells of `numbers`."""


def incident_count(rank: Rank) -> Markup | str:
    """Return the number of incidents, linked to their list."""
    found = rank.row["incidents"]
    return link(f"{rank.where}#incidents", found) if found else "0"


def changed(ranks: Sequence[Rank], settings: Mapping[str, str]) -> Markup | None:
    """Return a warning if a plugin changes the training, because its results then differ from those without hookd."""
    names = sorted({name for rank in ranks for name in rank.changed_by})
    if not names:
        return None
    whose = [str(rank.row["rank"]) for rank in ranks if rank.changed_by]
    where = "" if len(whose) == len(ranks) else f" on rank {', '.join(whose[:8])}"
    said = " and ".join(f"{name} ({settings[name]})" if settings.get(name) else name for name in names)
    return tag(
        "p", tag("b", "This training is being changed"), f" by {said}{where}. It stops when the plugin is disabled: ",
        tag("code", f"hookd plugin disable {ranks[0].row['pid']} {names[0]}"), class_="banner", role="alert",
    )  # fmt: skip
