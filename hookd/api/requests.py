"""The requests of a plugin to the agent, as its context has collected them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.wire.page.series import Bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.api.metrics import Counter, CounterChild, Gauge, Histogram
    from hookd.api.shown import Shown
    from hookd.api.totals import BackwardTotals, Totals


@dataclass
class Requests:
    """The requests of a plugin: its context writes them, and the agent reads them.

    Attributes:
        metrics: the metrics that it has declared.
        bound: limits the number of its series.
        tables: the dicts of `Context.per_module`.
        totals: requests of `Context.add_up`; `backward_totals` has those for backward passes.
        shown: requests of `Context.show_outputs`.
        phases: requests of `Context.add_up_phases`, by the page's number of the phase.
        held: intervals set by `Context.hold`, in steps by hook; "": all hooks.
        fixed: intervals that the user has set, in steps by hook; "": all others; None: the governor sets it.
        unwanted: the hooks that the plugin has disabled with `Context.listen`.
    """

    metrics: list[Counter | Gauge | Histogram] = field(default_factory=list)
    bound: Bound = field(default_factory=Bound)
    tables: list[dict[int, Any]] = field(default_factory=list)
    totals: Totals | None = None
    backward_totals: BackwardTotals | None = None
    shown: Shown | None = None
    phases: list[dict[int, CounterChild]] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, int | None] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)

    @property
    def is_fixed(self) -> bool:
        """Whether the interval of some hook ignores the budget."""
        return bool(self.held or self.fixed)

    def interval(self, hook: str) -> int | None:
        """Return the interval of a hook that ignores the budget, in steps; None: the governor sets it."""
        found = (by.get(hook, by.get("")) for by in (self.held, self.fixed))
        return next((interval for interval in found if interval is not None), None)

    def forget_modules(self, numbers: Iterable[int]) -> None:
        """Remove modules from the tables; done a minute after a model has gone."""
        for number in numbers:
            for table in self.tables:
                table.pop(number, None)
