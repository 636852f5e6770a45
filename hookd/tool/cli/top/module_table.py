"""The table of the modules of one target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hookd.tool.cli import output
from hookd.tool.cli.top.cells import safe
from hookd.tool.cli.top.growth import Growth
from hookd.tool.cli.top.modules import Finding, Modules
from hookd.tool.cli.top.node_table import size
from hookd.tool.cli.top.table import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hookd.wire.page import Snapshot


def _share(value: float) -> str:
    return f"{value * 100:.1f}%"


def _calls(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value / 1000:.3g}k"


COLUMNS = {
    "module": Column("MODULE", 20, 0, lambda name: safe(name) or "(loss)", is_right=False, is_falling=False),
    "type": Column("TYPE", 14, 20, safe, is_right=False, is_falling=False),
    "share": Column("SHARE", 6, 1, _share),
    "self_share": Column("SELF", 6, 6, _share),
    "forward_share": Column("FWD", 6, 3, _share),
    "backward_share": Column("BWD", 6, 4, _share),
    "inference_share": Column("INFER", 6, 4, _share),
    "calls_per_s": Column("CALL/S", 6, 5, _calls),
    "call_s": Column("A CALL", 7, 12, output.seconds),
    "output_bytes": Column("MEM", 5, 7, size),
    "output_norm": Column("NORM", 8, 8, output.number),
    "grad_norm": Column("GRAD", 8, 9, output.number),
    "update_ratio": Column("UPDATE", 8, 13, output.number),
    "zero_ratio": Column("ZEROS", 6, 14, output.percent),
    "finding": Column("FINDING", 12, 2, safe, is_right=False),
}
"""By the key in `--json`. Shares refer to the time of all calls of the whole model: forward, backward and inference."""
GAUGES = {
    "output_bytes": "hookd_memory_output_bytes",
    "output_norm": "hookd_activations_norm",
    "grad_norm": "hookd_activations_grad_norm",
    "update_ratio": "hookd_activations_update_ratio",
    "zero_ratio": "hookd_activations_zero_ratio",
}
WRONG, BORN = "red", "bold red"
"""Styles of modules with a finding, and of the module with the first NaN."""
CALLS, PASSES = ("forward", "inference"), ("backward",)
"""The kinds of counters that grow together; the backward is timed in sampled steps only."""
COUNTERS = ("calls", "seconds", "self_seconds")


class ModuleTable:
    """Makes a table of each copy of a page, with the growth of its counters since the previous copy."""

    def __init__(self) -> None:
        self._modules = Modules()
        self._age = 0
        self._growths: dict[tuple[str, ...], Growth] = {kinds: Growth() for kinds in (CALLS, PASSES)}
        self._now = 0.0
        self._findings: dict[int, Finding] = {}

    def take(self, now: float, snapshot: Snapshot) -> None:
        """Add a copy of the page, read at `now` in monotonic seconds."""
        self._now = now
        self._modules.take(snapshot)
        if self._modules.age != self._age:
            self._age = self._modules.age
            self._growths = {kinds: Growth() for kinds in (CALLS, PASSES)}
        for kinds, growth in self._growths.items():
            families = [self._family(kind, counter) for kind in kinds for counter in COUNTERS]
            columns = [self._modules.column(family, 0.0) for family in families]
            growth.advance(now, sum(map(self._of_roots, columns[:: len(COUNTERS)])), *columns)
        self._findings = self._modules.findings()

    def _family(self, kind: str, counter: str) -> str:
        """Return the family of a counter, for seconds that of the device time if there is one.

        The time of the host would only be that of launching kernels.
        """
        device = f"hookd_timing_{kind}_device_seconds"
        return device if counter == "seconds" and self._modules.has(device) else f"hookd_timing_{kind}_{counter}"

    def build(self) -> Table:
        """Return the table of the last copy, without columns that cannot have values."""
        modules = self._modules
        values: dict[str, Sequence[Any]] = {"module": modules.names, "type": modules.types, **self._shares()}
        values |= {key: modules.column(name) for key, name in GAUGES.items() if modules.has(name)}
        if self._findings:
            values["finding"] = [
                self._findings[row].short if row in self._findings else "" for row in range(len(modules.names))
            ]
        return Table(
            columns={key: column for key, column in COLUMNS.items() if key in values},
            values=values,
            names=modules.names,
            texts=[f"{name} {kind}".lower() for name, kind in zip(modules.names, modules.types, strict=True)],
            detail=self._detail,
            parents=modules.parents,
            styles={
                row: BORN if finding.short.startswith("first") else WRONG for row, finding in self._findings.items()
            },
        )

    def as_json(self) -> list[dict[str, str | float | None]]:
        """Return a row for each module; unknown numbers are null."""
        table = self.build()
        rows = zip(*(table.values[key] for key in table.columns), strict=True)
        return [
            {key: None if value != value else value for key, value in zip(table.columns, row, strict=True)}  # noqa: PLR0124
            for row in rows
        ]

    def _shares(self) -> dict[str, list[float]]:
        """Return each module's share of the time of all roots in the last interval, and its calls."""
        if not any(self._modules.has(f"hookd_timing_{kind}_seconds") for kind in CALLS):
            return {}
        trained, forward, own, inferred, inference, own_inference = self._grown(CALLS)
        backward, own_backward = self._backward(self._of_roots(trained))
        forward, backward, inference = map(self._with_inner, (forward, backward, inference))
        # The counters of a call are read one after the other, and it may return between two of them.
        pairs = ((own, forward), (own_backward, backward), (own_inference, inference))
        own, own_backward, own_inference = ([*map(min, *pair)] for pair in pairs)
        growth = self._growths[CALLS]
        is_still = growth.is_stale(self._now)
        model_s = 0.0 if is_still else sum(map(self._of_roots, (forward, backward, inference)))
        calls = _sums(trained, inferred)
        shares = {
            "share": _divided(_sums(forward, backward, inference), model_s),
            "self_share": _divided(_sums(own, own_backward, own_inference), model_s),
            "forward_share": _divided(forward, model_s),
            "backward_share": _divided(backward, model_s),
            "calls_per_s": [0.0] * len(calls) if is_still else _divided(calls, growth.elapsed_s),
            "call_s": [s / n if n > 0 else math.nan for s, n in zip(_sums(forward, inference), calls, strict=True)],
        }
        if any(inference):
            shares["inference_share"] = _divided(inference, model_s)
        if self._modules.has("hookd_timing_forward_device_seconds"):
            del shares["self_share"]  # not available for device time
        return shares

    def _backward(self, calls: float) -> tuple[list[float], list[float]]:
        """Return the seconds of the backward, scaled to `calls` of the roots.

        The backward is timed in sampled steps only.
        """
        passes, seconds, own = self._grown(PASSES)
        model_s = self._of_roots(passes)
        scale = calls / model_s if model_s > 0 else 1.0
        return [value * scale for value in seconds], [value * scale for value in own]

    def _with_inner(self, values: list[float]) -> list[float]:
        """Return values in which a module has at least the value of each of its submodules.

        A call in progress at the end of an interval counts in the next one, while its submodules' calls count already.
        """
        parents, names, totals = self._modules.parents, self._modules.names, list(values)
        for row in sorted(range(len(totals)), key=lambda row: names[row].count("."), reverse=True):
            if parents[row] >= 0:
                totals[parents[row]] = max(totals[parents[row]], totals[row])
        return totals

    def _of_roots(self, values: Sequence[float]) -> float:
        return sum(values[row] for row, parent in enumerate(self._modules.parents) if parent < 0)

    def _grown(self, kinds: tuple[str, ...]) -> list[list[float]]:
        """Return the growth of COUNTERS of each kind, with 0 for modules that are new since the last interval."""
        count = len(self._modules.names)
        return [column + [0.0] * (count - len(column)) for column in self._growths[kinds].columns]

    def _detail(self, row: int) -> str:
        name, kind = safe(self._modules.names[row]) or "(loss)", safe(self._modules.types[row])
        finding = self._findings[row].text if row in self._findings else ""
        return f"{name}: {kind}" + (f"; {safe(finding)}" if finding else "")


def _sums(*columns: Sequence[float]) -> list[float]:
    return [sum(row) for row in zip(*columns, strict=True)]


def _divided(values: Iterable[float], by: float) -> list[float]:
    return [value / by if by > 0 else math.nan for value in values]
