"""Select the series of a target that are served, because each of them costs Prometheus memory and disk for ever.

The page keeps full detail, for `report` and the API. Series are selected in this order, until there are `max_series`: those
without a module; modules with a finding; the top of the module tree; modules that a person has selected by a plugin's options
`modules` or `types`; the `top_modules` costliest (if costs are not measured, the first ones); the rest down to `max_depth`. Of a
replica (`hookd.tool.daemon.metrics.replicas`) it is the first two alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.tool.reports.report import plugin_options
from hookd.wire.module_names import depth

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hookd.tool.config import ServeConfig
    from hookd.wire.page import Family, Snapshot

CORE = frozenset({
    "hookd_steps", "hookd_micro_batches", "hookd_step_calls", "hookd_step_seconds", "hookd_modules", "hookd_incidents", "hookd_overhead_seconds",
    "hookd_overhead_ratio", "hookd_overhead_budget_ratio", "hookd_sampling_interval_steps", "hookd_plugin_errors",
    "hookd_plugin_state", "hookd_plugin_changes_training", "hookd_series_dropped", "hookd_agent_ticks", "hookd_compiling",
    "hookd_collectives", "hookd_collectives_phase_ratio", "hookd_plugin_call_seconds", "hookd_plugin_series_refused",
    "hookd_plugin_held_bytes",
})  # fmt: skip
"""Families of the agent itself: none is dropped up to MAX_CORE lines of them."""
MAX_CORE = 1000
"""Maximum number of lines of CORE. An agent with thirty plugins has some 300; a hostile page may have 200,000."""
FINDINGS = frozenset({"hookd_nan_origin", "hookd_nan_nonfinite", "hookd_activations_finding"})
"""Families in which a series above 0 is a finding about its module."""
OF_STEPS = ("hookd_activations_", "hookd_gradclip_", "hookd_optimizer_", "hookd_overhead_ratio")
"""Name prefixes of gauges that describe the most recent steps, and are not served during a hang."""
COSTS = frozenset({"hookd_timing_forward_seconds", "hookd_timing_backward_seconds", "hookd_timing_inference_seconds"})
"""Families whose sum is the cost of a module."""
MAX_PER_USER = 100_000
"""Maximum number of lines of one user, divided evenly among the user's targets."""
SELECTORS = ("modules", "types")
"""Plugin options that select modules; `*` selects all."""
HYSTERESIS = 1.25
"""Factor on the cost of a module that is already served, so that modules of similar cost do not alternate."""


@dataclass(frozen=True)
class Limits:
    """The limits of one target's series, described in `ServeConfig`; `detail` "all" lifts them."""

    detail: str = "auto"
    max_series: int = 1000
    max_depth: int = 2
    top_modules: int = 50
    replicas: bool = False

    @classmethod
    def of(cls, config: ServeConfig) -> Limits:
        """Return the limits of a configuration."""
        return cls(config.detail, config.max_series, config.max_depth, config.top_modules, config.replicas)


class Selection:
    """The selection of one target's series, renewed when something changes; used by one thread at a time.

    Attributes:
        dropped: the maximum number of lines left out so far; it never decreases, because it is served as a counter.
    """

    def __init__(self, limits: Limits) -> None:
        self.dropped = 0
        self._limits = limits
        self._chosen: frozenset[str] = frozenset()
        self._seen: object = None
        self._plan: list[Sequence[int]] = []
        self._reconsider_at = 0.0
        self._wait_s = 1.0

    def served(
        self, snapshot: Snapshot, now: float, most: int = MAX_PER_USER, *, is_replica: bool = False
    ) -> list[tuple[Family, Sequence[int]]]:
        """Return each family with the indexes of its series that are served.

        Args:
            snapshot: of the target.
            now: monotonic seconds; costs are compared again at growing intervals, of one hour at most.
            most: maximum number of lines of this target, whatever its limits.
            is_replica: whether another rank serves the same modules. Then only those with a finding are served, and the others
                do not count as left out.
        """
        families = snapshot.families
        if self._limits.detail == "all":
            return [(family, range(len(family.first))) for family in families]
        findings = sorted(_findings(families))
        prefixes = _selective(snapshot)
        most = min(most, MAX_PER_USER)
        seen = (most, is_replica, findings, prefixes, [(family.key, len(family.first)) for family in families])
        if seen != self._seen or now >= self._reconsider_at:
            self._wait_s = 1.0 if seen != self._seen else min(3600.0, 2 * self._wait_s)
            self._seen, self._reconsider_at = seen, now + self._wait_s
            self._plan = self._decide(snapshot, findings, prefixes, most, is_replica=is_replica)
            lines = sum(
                _lines(family) * (len(family.first) - len(kept))
                for family, kept in zip(families, self._plan, strict=True)
                if not (is_replica and "module" in family.labels)
            )
            self.dropped = max(self.dropped, lines)
        return list(zip(families, self._plan, strict=True))

    def _decide(
        self, snapshot: Snapshot, findings: Sequence[str], prefixes: tuple[str, ...], most: int, *, is_replica: bool
    ) -> list[Sequence[int]]:
        """Return the indexes to serve for each family: series without a module come first, then whole modules."""
        left, core = min(self._limits.max_series, most), min(MAX_CORE, most)
        plan: dict[int, Sequence[int]] = {}
        for number, family in enumerate(snapshot.families):
            if "module" not in family.labels:
                is_core = family.name in CORE
                room = max(0, core if is_core else left) // _lines(family)
                plan[number] = range(min(len(family.first), room))
                taken = len(plan[number]) * _lines(family)
                left -= taken
                core -= taken if is_core else 0
        self._chosen = self._choose(snapshot, findings, prefixes, left, is_replica=is_replica)
        for number, family in enumerate(snapshot.families):
            if number not in plan:
                at = family.labels.index("module")
                plan[number] = [k for k, values in enumerate(family.values) if values[at] in self._chosen]
        return [plan[number] for number in range(len(snapshot.families))]

    def _choose(
        self, snapshot: Snapshot, findings: Sequence[str], prefixes: tuple[str, ...], left: int, *, is_replica: bool
    ) -> frozenset[str]:
        """Choose modules in order of importance, until their lines exceed `left`."""
        lines: dict[str, int] = {}
        for family in snapshot.families:
            for module in _modules(family):
                lines[module] = lines.get(module, 0) + _lines(family)
        cost = self._costs(snapshot.families)
        costliest = sorted(lines, key=lambda name: -cost.get(name, 0.0))[: self._limits.top_modules]
        by_depth = sorted(lines, key=depth)
        top = [name for name in by_depth if depth(name) <= 1]
        rest = [name for name in by_depth if depth(name) <= self._limits.max_depth]
        selected = [
            name for family in snapshot.families if family.name.startswith(prefixes) for name in _modules(family)
        ]
        chosen = set()
        others = () if is_replica else (*top, *selected, *costliest, *rest)
        for name in dict.fromkeys([*findings, *others]):
            left -= lines.get(name, 0)
            if left < 0:
                break
            chosen.add(name)
        return frozenset(chosen)

    def _costs(self, families: Iterable[Family]) -> dict[str, float]:
        """Return the cost of each module, in seconds since the attach, children included."""
        cost: dict[str, float] = {}
        for family in families:
            if family.name in COSTS and family.labels == ("module",):
                for (module,), first in zip(family.values, family.first, strict=True):
                    cost[module] = cost.get(module, 0.0) + family.cells[first]
        return {name: s * (HYSTERESIS if name in self._chosen else 1.0) for name, s in cost.items() if s > 0}


def left_out(dropped: int) -> str:
    """Return the message that series are left out, and how to serve them."""
    return f"{dropped:,} series are not on /metrics, only in `hookd report`; set HOOKD_DETAIL=all to serve them"


def _lines(family: Family) -> int:
    """Return the number of lines of one series; a histogram has one for each bucket, the sum and the count."""
    return len(family.buckets) + 3 if family.kind == "histogram" else 1


def _modules(family: Family) -> Iterator[str]:
    if "module" in family.labels:
        at = family.labels.index("module")
        yield from (values[at] for values in family.values)


def _selective(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the name prefixes of the families of plugins for which a person has selected modules."""
    plugins = snapshot.identity.get("plugins")
    names = plugins if isinstance(plugins, dict) else ()
    return tuple(f"hookd_{name}_" for name in names if _is_selective(snapshot, name))


def _is_selective(snapshot: Snapshot, name: str) -> bool:
    settings = plugin_options(snapshot.identity, name, "settings")
    return any(settings.get(selector, "*") != "*" for selector in SELECTORS)


def _findings(families: Iterable[Family]) -> set[str]:
    return {
        module
        for family in families
        if family.name in FINDINGS
        for module, first in zip(_modules(family), family.first, strict=False)  # no label, no modules
        if family.cells[first] > 0
    }
