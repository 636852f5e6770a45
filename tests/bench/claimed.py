"""The overhead that hookd reports, compared with the overhead that is measured.

    python -m tests.bench.claimed [--pairs N] [--workload NAME]...

The default observers have a budget of 10 %, which they use up once their intervals have settled. Then blocks of steps
alternate with and without them, A B B A (`hookd/testing/pairs.py`), CPU time of the training thread: the real overhead is
how much longer the steps take. The reported overhead is the growth of `hookd_overhead_seconds_total` over all plugins in
the same steps, read from the page before and after each block. Both are shares of a plain step. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from functools import partial

import hookd.api.inprocess
from hookd.target.boot import bootstrap
from hookd.testing.pairs import PAIRS, QUICK_PAIRS, Estimate, Pairs, alternate, enough
from hookd.wire.page import PageReader
from tests.bench import fresh, workloads
from tests.bench.attached import Attached
from tests.bench.tables import Bound, Report, Table
from tests.bench.tools import SAMPLED_STEPS, SETTLED_STEPS

TITLE = "The overhead that is claimed, and the real one"
BUDGET = 0.10
WITHIN = 1.3
"""The largest factor between the two."""
WORKLOADS = ("mlp", "charlm", "convnet", *workloads.TRAINERS)


@dataclass(frozen=True)
class Overhead:
    """The measured and the reported overhead, as shares of the CPU time of a plain step."""

    claimed: float
    real: Estimate
    control: Estimate

    @property
    def factor(self) -> float:
        """By which factor the larger one exceeds the other."""
        return max(self.claimed / self.real.value, self.real.value / self.claimed)


class ReportedOverhead:
    """Adds up the reported overhead of some blocks."""

    def __init__(self, job: workloads.Job) -> None:
        self._job, self.seconds, self.steps = job, 0.0, 0
        self._reader = PageReader(os.dup(bootstrap._agent._page.fd))

    def block(self) -> float:
        """Train; return the ns per step. In plain blocks hookd reports nothing."""
        before = self._reported_s()
        found = self._job.block(SAMPLED_STEPS)
        said = self._reported_s() - before
        if said:
            self.seconds, self.steps = self.seconds + said, self.steps + SAMPLED_STEPS
        return found

    def _reported_s(self) -> float:
        families = {family.name: family for family in self._reader.read().families}
        return sum(series.cells[0] for series in families["hookd_overhead_seconds"].series)


def measure(workload: str, pairs: int) -> Overhead:
    """Measure one workload in this process."""
    workloads.steady()
    job = workloads.Job(workload)
    job.block(10)
    with Attached(hookd.api.inprocess.DEFAULT, budget=BUDGET) as attached:
        attached.settle(job.step, SETTLED_STEPS)
        attached.leave()
        reported = ReportedOverhead(job)
        found: Pairs = alternate(reported.block, attached.on, pairs, job.step)
    mean, control = found.mean, found.control
    real = Estimate(*(one - 1 for one in (mean.value, mean.low, mean.high)), tuple(one - 1 for one in mean.quarters))
    return Overhead(reported.seconds * 1e9 / reported.steps / (sum(found.plain) / len(found.plain)), real, control)


def report(*, quick: bool) -> Report:
    """Measure all workloads, each in a process of its own."""
    pairs = QUICK_PAIRS if quick else PAIRS
    found = {name: fresh.run(measure, name, pairs) for name in WORKLOADS}
    rows = [
        [
            name,
            f"{one.claimed:.3f}",
            f"{one.real.value:.3f} ({one.real.low:.3f} to {one.real.high:.3f})",
            f"{one.factor:.2f}",
            f"{one.control.low:.3f} to {one.control.high:.3f}",
        ]
        for name, one in found.items()
    ]
    columns = ["workload", "claimed", "real, 95 %", "factor", "A/A control"]
    bounds = [Bound(f"{name}: factor between claimed and real", WITHIN, one.factor) for name, one in found.items()]
    return Report([Table(f"Shares of a plain step, with a budget of {BUDGET:.0%}", columns, rows)], bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=enough, default=PAIRS)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    args = parser.parse_args()
    results = {name: fresh.run(partial(measure, name, args.pairs)) for name in args.workload or WORKLOADS}
    print(json.dumps({name: {**asdict(one), "factor": one.factor} for name, one in results.items()}, indent=1))


if __name__ == "__main__":
    main()
