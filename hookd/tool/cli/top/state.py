"""The state of `hookd top`, without a terminal: the targets or the modules of one, and the lines about them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hookd.tool.cli import output
from hookd.tool.cli.top import node_table
from hookd.tool.cli.top.cells import cut, safe
from hookd.tool.cli.top.module_table import ModuleTable
from hookd.tool.cli.top.view import View
from hookd.tool.reports.reading import is_called_only

if TYPE_CHECKING:
    from hookd.tool.cli.top.node import Node
    from hookd.tool.cli.top.target import Target

INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
NAME = 24
"""Columns of a run's name in the title."""


class State:
    """The targets, or the modules of the opened one.

    Args:
        node: the targets, read at least once.
        interval_s: seconds between refreshes.
        pid: of the target whose modules are shown first.
        run: label of the run to which the list is restricted.

    Attributes:
        opened: the target whose modules are shown, if any.
        is_paused: whether reading is paused.
    """

    def __init__(self, node: Node, interval_s: float, *, pid: int | None = None, run: str | None = None) -> None:
        self.interval_s = interval_s
        self.is_paused = False
        self.opened: Target | None = None
        self._node, self._run = node, run
        self._modules = ModuleTable()
        self._targets = View(node_table.build(self._listed()), "run")
        self._module_view: View | None = None
        if pid is not None:
            self._open(next(target for target in node.targets if target.pid == pid))

    def _listed(self) -> list[Target]:
        return node_table.listed(self._node.targets, self._run)

    @property
    def view(self) -> View:
        """The view that is shown."""
        return self._module_view or self._targets

    def refresh(self, now: float) -> None:
        """Read all targets again; `now` is in monotonic seconds."""
        self._node.read(now)
        self._targets.show(node_table.build(self._listed()))
        if self.opened is not None and self.opened.snapshot is not None and self._module_view is not None:
            self._modules.take(self.opened.read_at, self.opened.snapshot)
            self._module_view.show(self._modules.build())

    def enter(self) -> bool:
        """Open the target at the cursor, or fold the module there; return whether a target was opened."""
        if self._module_view is not None:
            self._module_view.turn_fold()
            return False
        row = self._targets.row
        if row is None:
            return False
        name = self._targets.table.names[row]
        return self._open(next(target for target in self._node.targets if (target.pid, target.start) == name))

    def _open(self, target: Target) -> bool:
        if target.snapshot is None:
            return False
        self.opened, self._modules = target, ModuleTable()
        self._modules.take(target.read_at, target.snapshot)
        self._module_view = View(self._modules.build(), "share")
        return True

    def back(self) -> None:
        """Clear the filter, else close the target, else show the targets of all runs."""
        if self.view.pattern:
            self.view.filter("")
        elif self._module_view is not None:
            self._module_view = self.opened = None
        elif self._run is not None:
            self._run = None
            self._targets.show(node_table.build(self._listed()))

    def change_interval(self, by: int) -> None:
        """Take the next longer interval, or for -1 the next shorter one."""
        longer = [interval for interval in INTERVALS_S if interval > self.interval_s]
        shorter = [interval for interval in INTERVALS_S if interval < self.interval_s]
        self.interval_s = next(iter(longer if by > 0 else reversed(shorter)), self.interval_s)

    # Lines

    def title(self) -> str:
        """Return the title: which targets, or which one."""
        if self.opened is not None:
            target = self.opened
            name = f"{cut(safe(target.run), NAME)} rank {cut(safe(target.rank), NAME)}"
            return f"{name}, process {target.pid} of {safe(target.user)}: {safe(target.state)}"
        listed = self._listed()
        ended = sum(1 for target in listed if target.ended)
        of_run = f" of {safe(self._run)}" if self._run is not None else ""
        count = f"{len(listed) - ended} target{'s' * (len(listed) - ended != 1)}{of_run}"
        count += f", {ended} ended" if ended else ""
        return f"hookd top: {count}, {self._node.daemon}"

    def pace(self) -> str:
        """Return the order of the rows and the interval."""
        by = self.view.table.columns[self.view.key].title + (" inverted" if self.view.is_inverted else "")
        return f"by {by}, " + ("paused" if self.is_paused else f"every {self.interval_s:g} s")

    def progress(self) -> str:
        """Return the progress of the opened target; empty without one."""
        if self.opened is None:
            return ""
        target, step = self.opened, self.opened.step
        star = "" if step["is_absolute"] else " since the attach"
        cost = target.value("hookd_overhead_ratio")
        words = [f"{step['calls']} calls, no step{star}" if is_called_only(step) else f"step {step['current']}{star}"]
        each = round(step["micro_batches"] or 1)
        words += [f"{each} micro-batches each"] if each > 1 else []
        words += [f"{target.steps_per_s:.3g} steps/s"] if target.steps_per_s >= 0 else []
        words += [f"{output.seconds(target.step_s)} a step"] if target.step_s > 0 else []
        words += [f"cost {output.percent(cost)}"] if cost >= 0 else []
        words += [f"loss {output.number(target.loss)}"] if not math.isnan(target.loss) else []
        return ", ".join(words)

    def phases(self) -> str:
        """Return each phase's share of the opened target's step; empty if unknown."""
        if self.opened is None or not (shares := self.opened.phases()):
            return ""
        text = "a step: " + ", ".join(f"{safe(name)} {share * 100:.0f} %" for name, share in shares)
        inference = self.opened.inference_share()
        return f"{text}; inference: {inference * 100:.0f} % of the time" if inference > 0 else text

    def detail(self) -> str:
        """Return details of the row at the cursor, or the reason why there is none."""
        row = self.view.row
        if row is not None:
            return self.view.table.detail(row)
        if self.view.pattern:
            return "no row contains this text"
        if self.opened is not None:
            return "no module has been called yet"
        return "no process is attached; `hookd ps` lists those that can be"
