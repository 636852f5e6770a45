"""The overhead of hookd in a training step, compared with the tools that a user might choose instead.

    python -m tests.bench.side_by_side [--pairs N] [--workload NAME]... [--tool NAME]...

Blocks of steps alternate inside one process for each workload, A B B A A B B A (`hookd/testing/pairs.py`), CPU time of the
training thread. One thread; one uncounted step after each switch to settle; the garbage collector is on, with all
earlier objects frozen. If a tool samples, a block is as long as its sampling interval. The CPU time of the
tool's own threads stands beside the ratios. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hookd.testing.pairs import PAIRS, QUICK_PAIRS, Estimate, Pairs, alternate, enough
from tests.bench import fresh, workloads
from tests.bench.tables import Bound, Report, Table
from tests.bench.tools import ALL, HOOKD, NAN, NOTHING, OBSERVERS, TOOLS, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

TITLE = "Side by side"
BOUNDS = {
    (OBSERVERS, "mlp"): 1.05, (OBSERVERS, "charlm"): 1.01, (OBSERVERS, "convnet"): 1.01, (ALL, "charlm"): 1.10,
    (NAN, "mlp"): 1.12, (NAN, "charlm"): 1.03, (NAN, "convnet"): 1.03,
}  # fmt: skip
QUICK = ("mlp", "convnet")
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Cost:
    """The overhead of one tool in one workload, or why it cannot be measured.

    Attributes:
        others: CPU time of all other threads while the tool was there, as a share of the training thread's.
    """

    tool: str
    pairs: Pairs = field(default_factory=Pairs)
    others: float = 0.0
    failure: str = ""

    @property
    def ratio(self) -> Estimate:
        """The ratio that is judged."""
        if self.failure:
            return Estimate.certain(math.inf)
        return self.pairs.mean if TOOLS[self.tool].samples else self.pairs.ratio

    @property
    def control(self) -> Estimate:
        return Estimate.certain(1.0) if self.failure else self.pairs.control


def costs(workload: str, names: list[str], pairs: int) -> dict[str, Cost]:
    """Measure some tools on one workload, in this process."""
    workloads.steady()
    for said in ("Anomaly Detection has been enabled", "Full backward hook is firing"):
        warnings.filterwarnings("ignore", said, UserWarning)
    job = workloads.Job(workload)
    job.block(10)
    return {name: _cost(job, TOOLS[name], pairs) for name in names}


def _cost(job: workloads.Job, tool: Tool, pairs: int) -> Cost:
    if not tool.is_installed:
        return Cost(tool.name, failure=NOT_INSTALLED)
    meter = Meter()
    try:
        with tool.opened(job) as switched:
            found = alternate(lambda: job.block(tool.steps), meter.around(switched), pairs, job.step)
    except Exception as exc:  # of a tool: it becomes a row like the others
        return Cost(tool.name, failure=f"fails: {type(exc).__name__}: {exc}".splitlines()[0][:120])
    return Cost(tool.name, found, meter.others)


class Meter:
    """Compares the CPU time of the whole process with that of this thread, while a tool is active."""

    def __init__(self) -> None:
        self._process = self._thread = 0

    def around(
        self, switched: Callable[[], AbstractContextManager[object]]
    ) -> Callable[[], AbstractContextManager[None]]:
        @contextlib.contextmanager
        def metered() -> Iterator[None]:
            with switched():
                process, thread = time.process_time_ns(), time.thread_time_ns()
                yield
                self._process += time.process_time_ns() - process
                self._thread += time.thread_time_ns() - thread

        return metered

    @property
    def others(self) -> float:
        """The CPU time of all other threads, as a share of this one's."""
        return max(0.0, self._process / self._thread - 1)


def report(*, quick: bool = False) -> Report:
    """Measure every tool on every workload, each workload in a process of its own."""
    names, pairs = list(TOOLS), QUICK_PAIRS if quick else PAIRS
    chosen = [name for name in workloads.available() if not quick or name in QUICK]
    found = {name: fresh.run(costs, name, names, pairs) for name in chosen}
    tables = [_summary(found), _verdict(found), *(_detail(name, found[name]) for name in found)]
    return Report(tables, bounds(found))


def bounds(found: dict[str, dict[str, Cost]]) -> list[Bound]:
    """Compare with the promised bounds: the upper end of each estimate counts."""
    promised = [
        Bound(f"hookd {name}, {workload}", limit, found[workload][name].ratio.high)
        for (name, workload), limit in BOUNDS.items()
        if name in found.get(workload, ())
    ]
    within = [
        Bound(
            f"hookd {NOTHING}, {workload}: the control's bound",
            costs_[NOTHING].control.high,
            costs_[NOTHING].ratio.value,
        )
        for workload, costs_ in found.items()
        if NOTHING in costs_
    ]
    return promised + within


def _summary(found: dict[str, dict[str, Cost]]) -> Table:
    rows = [
        [_label(tool), *(_cell(found[name][tool.name]) for name in found), tool.delivers]
        for tool in TOOLS.values()
    ]  # fmt: skip
    columns = ["a step with", *found, "what that delivers"]
    return Table(
        "A training step with a tool, to one without ≤ the upper 95 % bound; the median, or where not all steps are alike the mean",
        columns,
        rows,
    )


def _label(tool: Tool) -> str:
    return f"**hookd {tool.name}**" if tool in HOOKD else tool.label


def _cell(cost: Cost) -> str:
    if cost.failure:
        return cost.failure.partition(":")[0]
    return f"{cost.ratio.value:.3f} ≤ {cost.ratio.high:.3f}"


def _verdict(found: dict[str, dict[str, Cost]]) -> Table:
    """Return the share of each peer's overhead that hookd needs for the same features, or more."""
    rows = [
        [
            tool.name,
            f"hookd {tool.beside}",
            *(_share(found[name][tool.beside], found[name][tool.name]) for name in found),
        ]
        for tool in TOOLS.values()
        if tool.beside
    ]
    columns = ["instead of", "hookd would be", *found]
    return Table(
        "What hookd adds to a step, as a share of what the other adds; **above 1 hookd is dearer**", columns, rows
    )


def _share(ours: Cost, theirs: Cost) -> str:
    if ours.failure or theirs.failure:
        return "-"
    own, other = ours.ratio.value - 1, theirs.ratio.value - 1
    if theirs.ratio.low <= 1:  # indistinguishable from nothing, so there is no share of it
        return "neither adds" if ours.ratio.low <= 1 else f"**{own:.1%} to nothing**"
    return f"**{own / other:.2f}**" if own > other else f"{max(0.0, own / other):.2f}"


def _detail(workload: str, costs_: dict[str, Cost]) -> Table:
    rows = [[_label(tool), *_figures(costs_[tool.name])] for tool in TOOLS.values()]
    plain = statistics.median(block for cost in costs_.values() for block in cost.pairs.plain)
    title = f"{workload}: {plain / 1e6:.1f} ms a step. {workloads.WORKLOADS[workload].__doc__}"
    columns = ["with", "median", "95 % bounds", "middle half", "mean", "added µs", "other threads", "A/A control"]
    return Table(title, columns, rows)


def _figures(cost: Cost) -> list[str]:
    if cost.failure:
        return [cost.failure, *[""] * 6]
    ratio, control, mean = cost.pairs.ratio, cost.pairs.control, cost.pairs.mean
    return [f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", "{:.3f} to {:.3f}".format(*ratio.quarters),
            f"{mean.value:.3f} ≤ {mean.high:.3f}", f"{cost.pairs.added.value / 1e3:,.0f}", f"{cost.others:.1%}",
            f"{control.value:.3f} ({control.low:.3f} to {control.high:.3f})"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=enough, default=PAIRS)
    parser.add_argument("--workload", action="append", choices=workloads.WORKLOADS)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    args = parser.parse_args()
    chosen = args.workload or workloads.available()
    found = {workload: fresh.run(costs, workload, args.tool or list(TOOLS), args.pairs) for workload in chosen}
    print(json.dumps({
        "costs": {workload: {name: _said(cost) for name, cost in found[workload].items()} for workload in found},
        "bounds": {bound.text: asdict(bound) for bound in bounds(found)},
    }))  # fmt: skip


def _said(cost: Cost) -> dict[str, object]:
    if cost.failure:
        return {"failure": cost.failure}
    pairs = cost.pairs
    estimates = {"median": pairs.ratio, "mean": pairs.mean, "added_ns": pairs.added, "control": pairs.control}
    return {name: asdict(one) for name, one in estimates.items()} | {
        "step_us": statistics.median(pairs.plain) / 1e3,
        "others": cost.others,
    }


if __name__ == "__main__":
    main()
