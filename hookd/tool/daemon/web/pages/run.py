"""`/run/NAME`: the ranks of a run compared, and the modules, plugins and state of one of them."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.tool.daemon.fleet.history import LOSSES, step_times, unfinished
from hookd.tool.daemon.web.pages import fingerprint, plots, ranks
from hookd.tool.daemon.web.pages import parts as shared
from hookd.tool.daemon.web.pages.curves import Line, Mark, chart
from hookd.tool.daemon.web.pages.health import banners, is_mild
from hookd.tool.daemon.web.pages.heat import VIEWS
from hookd.tool.daemon.web.pages.home import incident_table
from hookd.tool.daemon.web.pages.html import Markup, address, join, link, section, table, tag
from hookd.tool.daemon.web.pages.modules import HeatMap, MapChoice
from hookd.tool.daemon.web.pages.ranks import Rank
from hookd.tool.daemon.web.pages.tree import Tree
from hookd.tool.reports import wording
from hookd.tool.reports.reading import counted, is_called_only, looks_at, paused
from hookd.tool.reports.report import build_report, plugin_options
from hookd.tool.reports.wording import count, moment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hookd.tool.daemon.fingerprints.keeper import Keeper
    from hookd.tool.daemon.fleet.history import History, Sample
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.wire.incident import IncidentRow
    from hookd.wire.report import PluginRow, Report

MOST_CURVES = plots.COLOURS
"""Maximum number of ranks whose curves are drawn."""
MOST_RANKS = 256
"""Maximum number of ranks in the table, the first ones."""

NOTHING = MapChoice()


@dataclass(frozen=True)
class Choice:
    """The reader's choices, from the URL.

    Attributes:
        pid: pid of the rank to show; None for the first live one.
        modules: choices for the heat map.
    """

    pid: int | None = None
    modules: MapChoice = NOTHING

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Choice:
        """Return the choices of a query; invalid parameters are ignored."""
        view = query.get("view", "")
        asked = MapChoice(
            view if view in VIEWS else "time",
            query.get("m", ""),
            query.get("q", "").strip()[:200],
            _whole(query.get("p", ""), 1) or 1,
        )
        return cls(_whole(query.get("pid", ""), None), asked)

    def address(self, run: str, at: str = "", **other: Any) -> str:
        """Return the URL for these choices, with `other` replaced."""
        now: dict[str, int | str | None] = {
            "pid": self.pid,
            "view": self.modules.view if self.modules.view != "time" else None,
            "m": self.modules.module,
            "q": self.modules.search,
            "p": self.modules.page if self.modules.page > 1 else None,
        }
        return address("run", run, at=at, **{**now, **other})


def _whole(text: str, default: int | None) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 10 else default


def parts(
    name: str,
    targets: Sequence[Target],
    history: History,
    incidents: Sequence[IncidentRow],
    choice: Choice,
    *,
    fingerprints: Keeper | None = None,
) -> list[Markup]:
    """Return the parts of the page.

    Args:
        name: of the run.
        targets: its ranks, including ended ones that linger; may be empty.
        history: of the targets.
        incidents: of the run, newest first.
        choice: the reader's.
        fingerprints: that the daemon keeps.
    """
    every = ranks.worst_first(Rank.of(rank, history) for rank in targets)
    title = tag("h1", "run ", tag("b", name))
    listed = section("incidents", "Incidents", incident_table(incidents, "Incidents of this run", has_run=False))
    if not every:
        text = "None of its ranks is watched any more; only the stored incidents are left."
        return [title, section("gone", "Ranks", tag("p", text, class_="soft")), listed]
    chosen = _chosen(every, choice.pid)
    return [
        title,
        tag("p", "of user ", tag("b", ", ".join(dict.fromkeys(rank.row["user"] for rank in every))), class_="soft"),
        *_sections(
            name,
            every,
            chosen,
            replace(choice, pid=chosen.row["pid"] if choice.pid else None),
            _Time(history.now(), [_mark(row) for row in incidents if not is_mild(row["kind"])]),
        ),
        *_fingerprint(chosen, fingerprints),
        listed,
    ]


def _fingerprint(chosen: Rank, fingerprints: Keeper | None) -> Iterator[Markup]:
    kept = None if fingerprints is None else fingerprints.of(chosen.target)
    if fingerprints is not None and kept is not None:
        yield section("fingerprint", "Fingerprint", *fingerprint.parts(kept, fingerprints.every()))


def _chosen(every: Sequence[Rank], pid: int | None) -> Rank:
    """Return the rank to show: the requested one, else the worst if something is wrong with it, else the first live one."""
    alive = [rank for rank in every if rank.target.ended is None]
    first = every[0] if every[0].health.is_bad else (alive or list(every))[0]
    return next((rank for rank in every if rank.row["pid"] == pid), first)


class _Time(NamedTuple):
    """The time axis of the charts: its right end, and what happened."""

    now: float
    marks: Sequence[Mark]


def _mark(row: IncidentRow) -> Mark:
    module = f" in {row['module']}" if row["module"] else ""
    return Mark(row["time"], f"{row['kind']}{module}, rank {row['rank']} (#{row['id']})")


def _sections(name: str, every: Sequence[Rank], chosen: Rank, choice: Choice, time: _Time) -> Iterator[Markup]:
    snapshot = chosen.target.last()
    report = build_report(snapshot, chosen.row["pid"], has_modules=False) if snapshot is not None else None
    yield section("ranks", "Ranks", *_ranks(name, every, chosen, choice))
    yield section("curves", "The last minutes", _curves(every, chosen, time))
    shown = f"rank {chosen.row['rank']}, process {chosen.row['pid']} of user {chosen.row['user']}"
    yield tag("section", tag("h2", shown, class_="of"), id="shown", aria_label=shown)
    if snapshot is None or report is None or chosen.target.state == "corrupt":
        text = "The page of this target cannot be trusted, so its content is not shown. The process itself continues."
        yield section("state", "State", tag("p", text, class_="bad"))
        return
    yield section("state", "State", *_state(chosen, report))
    heat = HeatMap(Tree(snapshot), choice.modules, lambda at="", **other: choice.address(name, at, **other))
    yield heat.markup()
    yield heat.search()
    yield section("plugins", "Plugins and their cost", _plugins(report))


def _ranks(name: str, every: Sequence[Rank], chosen: Rank, choice: Choice) -> Iterator[object]:
    snapshots = [rank.target.last() for rank in every if rank.changed_by]
    settings = {
        plugin: ", ".join(f"{key}={value}" for key, value in plugin_options(snapshot.identity, plugin).items())
        for snapshot in snapshots
        if snapshot is not None
        for plugin in {plugin for rank in every for plugin in rank.changed_by}
    }
    yield ranks.changed(every, settings)
    yield from banners([(str(rank.row["rank"]), rank.health) for rank in every])
    yield table("Ranks of this run", *_compared(name, every[:MOST_RANKS], chosen, choice))
    if len(every) > MOST_RANKS:
        yield tag("p", f"The first {MOST_RANKS} of {len(every)}.", class_="soft")
    steps = [rank.row["step"] for rank in every if rank.row["step"]]
    if any(not step["is_absolute"] and not is_called_only(step) for step in steps):
        yield tag("p", "* counted from the attach", class_="soft")


def _compared(
    name: str, every: Sequence[Rank], chosen: Rank, choice: Choice
) -> tuple[Sequence[str], list[list[object]]]:
    """Return headings and rows of the table of ranks; several ranks are compared with their median."""
    times = [seconds for rank in every if (seconds := rank.step_s)]
    median, slowest = statistics.median(times) if times else 0.0, max(times, default=0.0)
    head = ["rank", "health", *ranks.NUMBERS, ">of median", "of slowest", ">incidents", ">pid"]
    rows = []
    for rank in every:
        where = replace(choice, pid=rank.row["pid"]).address(name)
        current = "true" if rank is chosen and len(every) > 1 else None
        who = [link(where, rank.row["rank"], aria_current=current), rank.health.markup()]
        speed = [*ranks.numbers(rank), *_of_median(rank.step_s, median, slowest)]
        rows.append([*who, *speed, rank.row["incidents"], rank.row["pid"]])
    if len(every) > 1:
        return head, rows
    alone = [n for n, title in enumerate(head) if title not in (">of median", "of slowest")]
    return [head[n] for n in alone], [[row[n] for n in alone] for row in rows]


def _of_median(seconds: float | None, median: float, slowest: float) -> list[object]:
    """Return the cells that compare a step time with the other ranks: the ratio to the median, and a bar."""
    if not seconds or not median:
        return ["-", None]
    is_slow = seconds > ranks.SLOW * median
    ratio = tag("span", f"{seconds / median:.2f}x", class_="bad" if is_slow else None)
    return [ratio, plots.bar(seconds / slowest)]


def _curves(every: Sequence[Rank], chosen: Rank, time: _Time) -> Markup:
    """Draw step times and losses of the slowest ranks; for a single rank the losses of each backward."""
    drawn = sorted(every, key=lambda rank: rank.step_s or 0.0, reverse=True)[:MOST_CURVES]
    drawn = sorted({id(rank): rank for rank in (*drawn[: MOST_CURVES - 1], chosen)}.values(), key=ranks.order)
    times = [
        Line(f"rank {rank.row['rank']}", n, step_times(rank.samples), _unfinished(rank, time.now))
        for n, rank in enumerate(drawn)
    ]
    losses = [Line(f"rank {rank.row['rank']}", n, _loss(rank, 0)) for n, rank in enumerate(drawn)]
    if len(drawn) == 1:
        losses = [Line(f"backward {n}", n, _loss(chosen, n)) for n in range(LOSSES)]
    left_out = f"The {len(drawn)} slowest of {len(every)} ranks are drawn. " if len(drawn) < len(every) else ""
    said = tag(
        "p", f"{left_out}The loss is the tensor on which the first torch.autograd.backward of a step was called. A step time is the"
        " mean of the steps since the previous point.", class_="soft",
    )  # fmt: skip
    pictures = (
        chart("Time of a step", times, wording.seconds, now=time.now, marks=time.marks, is_from_zero=True),
        chart("Loss", losses, wording.number, now=time.now, marks=time.marks),
    )
    return join(tag("div", *pictures, class_="pictures"), said)


def _unfinished(rank: Rank, now: float) -> tuple[float, float] | None:
    return unfinished(rank.samples, now) if rank.target.ended is None else None


def _loss(rank: Rank, backward: int) -> list[tuple[float, float]]:
    """Return the losses of one backward, where there was one since the sample before."""
    first, pairs = rank.samples[:1], itertools.pairwise(rank.samples)
    news = (after for before, after in pairs if _progress(before) != _progress(after))
    return [(sample.time, sample.losses[backward]) for sample in (*first, *news)]


def _progress(sample: Sample) -> list[float]:
    return [sample.steps, *(loss for loss in sample.losses if not math.isnan(loss))]


def _state(rank: Rank, report: Report) -> Iterator[object]:
    row = rank.row
    for why in filter(None, (row["how"] and f"It {row['how']}.", paused(report, row))):
        yield tag("p", why, class_="bad")
    seen = {state: value for state, value in report["observed"].items() if value}
    blind = ", ".join(f"{value:,.0f} {state.replace('_', ' ')}" for state, value in seen.items() if state != "observed")
    what, number = counted(report["step"])
    yield shared.tiles(
        (
            (what, f"{number:,}"),
            ("a step", wording.seconds(rank.step_s)),
            ("steps a second", wording.number(rank.rate)),
            ("hookd's cost", wording.percent(rank.cost)),
            ("modules observed", f"{seen.get('observed', 0):,.0f}"),
        )
    )
    yield from shared.phase_shares(report, rank.step_s)
    age = row["heartbeat_age_s"]
    yield shared.facts(
        (
            ("script", row["script"]),
            ("watched since", f"{moment(row['attached'])} ({row['method']})"),
            ("Python, torch", f"{row['python']}, {row['torch']}"),
            ("last event", None if age is None else f"{wording.span(age)} ago"),
            ("modules not observed", blind),
        )
    )


def _plugins(report: Report) -> Markup:
    if not report["plugins"]:
        return tag("p", "None is loaded.", class_="soft")
    head = ("plugin", "state", "training", "looks at", ">errors", ">time spent", "settings")
    whole, own = (wording.seconds(report["overhead"][key]) for key in ("seconds", "own_seconds"))
    made = table("Plugins", head, [_plugin(plugin) for plugin in report["plugins"]])
    note = f"hookd and its plugins have taken {whole} in total, including {own} for hookd itself."
    return join(made, tag("p", note, class_="soft"))


def _plugin(plugin: PluginRow) -> list[object]:
    state, changes = plugin["state"] or "-", plugin["changes_training"]
    settings = ", ".join(f"{key}={value}" for key, value in (plugin["settings"] or plugin["options"]).items())
    errors = plugin["errors"] or 0
    return [
        plugin["name"],
        tag("span", state, class_="good" if state == "active" else "bad"),
        tag("span", "changes it", class_="bad") if changes else "could change it" if changes is False else "only looks",
        looks_at(plugin),
        tag("span", f"{errors:.0f}", class_="bad") if errors else "0",
        wording.seconds(plugin["overhead_seconds"]),
        tag("span", settings, class_="mono"),
    ]


def title(name: str, targets: Sequence[Target]) -> str:
    """Return the title of the page."""
    return f"run {name} ({count(len(targets), 'rank')})"
