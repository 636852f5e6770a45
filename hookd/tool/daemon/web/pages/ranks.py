"""Rows of ranks, for the table of the first page and that of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.daemon.describe import target_row
from hookd.tool.daemon.fleet.history import Sample, step_now, steps_per_second
from hookd.tool.daemon.fleet.ranks import family, scalar
from hookd.tool.daemon.web.pages.html import Markup, address, join, link, tag
from hookd.tool.reports import wording
from hookd.tool.reports.reading import is_called_only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        cost: hookd's share of its time; None if unknown.
        changed_by: plugins that currently change its training.
    """

    target: Target
    row: TargetRow
    samples: Sequence[Sample]
    cost: float | None
    changed_by: Sequence[str]

    @classmethod
    def of(cls, target: Target, history: History) -> Rank:
        """Gather the known data of a target, without reading its page."""
        snapshot = target.last()
        is_alive = target.ended is None
        return cls(
            target,
            target_row(target),
            history.of(target),
            _cost(snapshot) if snapshot is not None else None,
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


def _cost(snapshot: Snapshot) -> float | None:
    ratio = scalar(snapshot, "hookd_overhead_ratio")
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


def state(rank: Rank) -> Markup:
    """Return the state of a target, problems first."""
    row = rank.row
    message = row["state"] if row["reason"] in (None, row["state"], "exited") else f"{row['state']}: {row['reason']}"
    if row["hang"]:
        return tag("span", f"hangs {row['hang']['where']}", class_="bad")
    ongoing = [kind for kind in row["ongoing"] if kind not in ("hang", row["state"])]
    if ongoing:
        return join(tag("span", ", ".join(ongoing), class_="bad"), f" ({message})")
    kinds = {"attached": "good", "ended": "soft", "detached": "soft"}
    return tag("span", message, class_=kinds.get(row["state"], "bad"))


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
        wording.percent(rank.cost),
    ]


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
