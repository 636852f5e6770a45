"""The duration of a scrape: one page of 50,000 series, and 64 pages of 2,000, beside prometheus_client's own encoder.

    python -m tests.bench --only scrape

Real pages of this process are read, decoded and rendered as by `GET /metrics` in detail "all", all values changed before
each scrape. The best and the median of the rounds, in ms, after the first, which builds the cached parts of each series.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from prometheus_client.exposition import choose_encoder

from hookd.tool.daemon.fleet.targets import Target
from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
from hookd.tool.daemon.metrics.families import PageFamily
from hookd.tool.daemon.metrics.scrapes import render
from hookd.tool.daemon.metrics.selection import Limits
from hookd.wire import labels
from hookd.wire.page import PageWriter
from tests.bench.tables import Bound, Report, Table

TITLE = "A scrape"
FORMATS = {"text": "", "OpenMetrics": "application/openmetrics-text; version=1.0.0"}
SIZES = {(1, 50_000): 100, (64, 2_000): 250}
"""Targets and series of each, and in how many ms they are to be served."""
TIMES = ("first", "best", "median", "generate_latest")
ROUNDS = 10
FAMILIES = 10


class Fleet:
    """Targets as the collector asks for them, over pages of this process."""

    def __init__(self, targets: int, series: int) -> None:
        self.pages = [page_of(str(rank), series) for rank in range(targets)]
        self.listed = [Target(os.getpid(), os.dup(page.fd)) for page, _ in self.pages]
        for rank, target in enumerate(self.listed):
            target.claim = labels.Claim(os.getpid(), os.getpid(), str(rank), "train", "train")

    def targets(self) -> list[Target]:
        return self.listed

    def change(self) -> None:
        """Change the value of every series."""
        for page, places in self.pages:
            for at in places:
                page.cells[at] += 0.37

    def close(self) -> None:
        for target in self.listed:
            target.close()
        for page, _ in self.pages:
            page.close()


def page_of(rank: str, series: int) -> tuple[PageWriter, list[int]]:
    page = PageWriter.create({"pid": os.getpid(), "run": "train", "rank": rank, "script": "train.py"})
    page.set_state("running")
    places = []
    for number in range(FAMILIES):
        family = page.family(f"hookd_bench_{number}", ("gauge", "counter")[number % 2], "A family.", ("module",))
        for n in range(series // FAMILIES):
            places.append(page.series(family, (f"model.layers.{n // 4}.{('attn', 'mlp', 'ln1', 'ln2')[n % 4]}",)))
            page.cells[places[-1]] = n * 1.37 + number / 1000
    return page, places


def measure(targets: int, series: int, rounds: int) -> list[dict[str, Any]]:
    """Return one row for each format."""
    fleet = Fleet(targets, series)
    try:
        collector = FleetCollector(fleet, AttachCounter(), Limits(detail="all"))  # type: ignore[arg-type]
        about = {"targets": targets, "series": series}
        return [{**about, **_timed(fleet, collector, name, rounds)} for name in FORMATS]
    finally:
        fleet.close()


def _timed(fleet: Fleet, collector: FleetCollector, name: str, rounds: int) -> dict[str, Any]:
    encoder, _ = choose_encoder(FORMATS[name])
    ours, theirs = [], []
    for _ in range(rounds + 1):
        fleet.change()
        begun = time.perf_counter()
        render(collector, FORMATS[name], frozenset(), is_gzip=False)
        ours.append(1e3 * (time.perf_counter() - begun))
        given = Given([one.metric() if isinstance(one, PageFamily) else one for one in collector.families()])
        begun = time.perf_counter()
        encoder(given)
        theirs.append(1e3 * (time.perf_counter() - begun))
    return {
        "format": name, "first": ours[0], "best": min(ours[1:]),
        "median": statistics.median(ours[1:]), "generate_latest": statistics.median(theirs[1:]),
        "ratio": statistics.median(a / b for a, b in zip(ours[1:], theirs[1:], strict=True)),
    }  # fmt: skip


class Given:
    """A registry of these families."""

    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = metrics

    def collect(self) -> Any:
        return iter(self._metrics)


def report(*, quick: bool = False) -> Report:
    """Measure both sizes in both formats."""
    rows = [row for size in SIZES for row in measure(*size, 3 if quick else ROUNDS)]
    shown = [
        [f"{r['targets']} x {r['series']:,}", r["format"], *(f"{r[t]:.0f}" for t in TIMES), f"{r['ratio']:.2f}"]
        for r in rows
    ]
    columns = ["targets x series", "format", *TIMES, "ratio to it"]
    return Report([Table("ms of a scrape", columns, shown)], [bound for row in rows for bound in bounds(row)])


def bounds(row: dict[str, Any]) -> list[Bound]:
    """Compare with the promised bounds."""
    name = f"{row['targets']} x {row['series']:,}, {row['format']}"
    return [Bound(f"{name}: ms, the best", SIZES[row["targets"], row["series"]], row["best"]),
            Bound(f"{name}: ours to prometheus_client's", 0.35, row["ratio"])]  # fmt: skip
