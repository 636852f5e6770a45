"""The agent's side of the plugins' contexts (`hookd.api.context.Host`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.target.events.phases import PHASE
from hookd.wire import page as pages
from hookd.wire.originals import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hookd.api.events import Module, Returned
    from hookd.target.boot.arming import Life
    from hookd.target.boot.identity import Process
    from hookd.target.entry.counting import Counting
    from hookd.target.entry.threads import Threads
    from hookd.target.events.batching import Portions
    from hookd.target.events.step_count import StepCount
    from hookd.target.modeltree.models import Models
    from hookd.target.plugins.background import Background
    from hookd.target.plugins.core_metrics import CoreMetrics
    from hookd.target.plugins.governor import Governor
    from hookd.target.plugins.incidents import Incidents
    from hookd.target.plugins.listeners import Registry
    from hookd.target.remote.marks import Marks
    from hookd.target.remote.streams import Streams
    from hookd.target.tensors.statistics import Numeric
    from hookd.wire.page import PageWriter

PAUSED = float(pages.PHASES.index("paused"))
PAUSE_S = 0.05
"""Interval at which a paused training checks whether it may go on."""


class PluginHost:
    """Answers the plugins' contexts; `hookd.api.context.Context` documents the answers."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        process: Process,
        life: Life,
        local: Threads,
        count: StepCount,
        marks: Marks,
        models: Models,
        counting: Counting,
        portions: Portions,
        numeric: Numeric,
        registry: Registry,
        governor: Governor,
        core: CoreMetrics,
        incidents: Incidents,
        background: Background,
        streams: Streams,
    ) -> None:
        self.page, self.numeric = page, numeric
        self.reader_of, self.send = streams.reader_of, streams.send
        self.report_incident, self.write_log, self.run_in_background = incidents.report, page.log, background.add
        self.step_now, self.mark_now = count.absolute, marks.last
        self.module_states, self.ordered_parameters = models.coverage.states, models.names.ordered_parameters
        self._cells, self._process, self._life, self._local, self._count = page.cells, process, life, local, count
        self._names, self._counting, self._portions = models.names, counting, portions
        self._registry, self._governor, self._core = registry, governor, core
        self._is_due: Callable[[str], bool] = lambda _: False
        self.optimizers: Callable[[], list[Optimizer]] = list

    def know_optimizers(self, optimizers: Callable[[], list[Optimizer]]) -> None:
        """Set the function that returns the optimizers that have made a step."""
        self.optimizers = optimizers

    def pause_until(self, is_due: Callable[[str], bool]) -> None:
        """Set the condition that ends a pause: whether a change of the plugin is due, by its name."""
        self._is_due = is_due

    @property
    def run(self) -> str:
        """The name of the training job."""
        return self._process.run

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return self._process.rank

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self._process.world_size

    def step_offset(self) -> int | None:
        """Return the number of steps before the attach; None while unknown."""
        return self._count.offset

    def module_stack(self) -> tuple[Module, ...]:
        """Return the modules whose calls the calling thread is inside."""
        thread = self._local.thread
        return thread.stack()

    def returned_now(self) -> Sequence[Returned]:
        """Return the outputs of the calling thread's module calls."""
        return self._portions.returned(self._local.thread)

    def outermost_modules(self) -> list[tuple[Module, nn.Module]]:
        """Return the roots of all models that are alive, with their outermost wrappers."""
        return [(model.root, root) for model, root in self._names.live_roots()]

    def interval_of(self, plugin: str) -> int:
        """Return how many steps lie between two sampled steps of a plugin."""
        return self._registry.named(plugin).interval if self._registry.has(plugin) else 1

    def is_alone(self, plugin: str) -> bool:
        """Whether no other plugin's sampled hooks are called in this step."""
        return not any(loaded.looks for loaded in self._registry if loaded.name != plugin)

    def resample(self) -> None:
        """Set the switches again after a plugin has changed which hooks it wants; at the end of a step, for the next one."""
        if self._count.is_closing:
            self._governor.is_to_listen = True
        else:
            self._governor.listen(self._count.turns)
        for loaded in self._registry:
            self._core.show_interval(loaded)

    def shows_in_c(self) -> bool:
        """Whether C computes the statistics of outputs."""
        return self._counting.hidden is not None and self.numeric.looks_in_c()

    def has_seen_all(self, plugin: str) -> bool:
        """Whether hookd has checked all outputs in the calling thread's outermost call that were not passed to the plugin."""
        if not self._registry.has(plugin):
            return False
        return self._counting.has_seen_all(self._local.thread, self._registry.named(plugin).number)

    def pause(self, plugin: str) -> None:
        """Block the calling thread until the plugin is changed or unloaded, or the agent leaves."""
        thread = self._local.thread
        cell = thread.beat + PHASE
        phase, self._cells[cell] = self._cells[cell], PAUSED
        try:
            while self._life.is_live and not self._is_due(plugin) and self._registry.is_active(plugin):
                clock.sleep(PAUSE_S)  # short sleeps, so that signal handlers run in between
        finally:
            self._cells[cell] = phase
