"""Creates the parts of an agent, and passes each the others that it needs.

Only `hookd.target.boot` refers to all parts. No part gets this file's `Parts`; each takes the few others that it uses as
arguments. If two parts call each other, a method of the earlier one sets the later one (`stop_with`, `report_to`,
`pause_until`, `plan_with`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookd.target.boot.arming import Arming, Life
from hookd.target.boot.ticks import Ticks
from hookd.target.entry import dynamo
from hookd.target.entry.calls import Calls
from hookd.target.entry.hidden import Callbacks
from hookd.target.entry.threads import Heartbeats, Threads
from hookd.target.events.batching import Portions
from hookd.target.events.boundaries import Boundaries
from hookd.target.events.collectives import Collectives, PhaseCollectives
from hookd.target.events.data import Data
from hookd.target.events.dispatch import Dispatch
from hookd.target.events.inference import Inference
from hookd.target.events.liveness import Liveness, all_issued
from hookd.target.events.micro_batches import MicroBatches
from hookd.target.events.phases import Phases
from hookd.target.events.step_count import StepCount
from hookd.target.events.steps import Steps
from hookd.target.modeltree.models import Models
from hookd.target.modeltree.snapshot import Trees
from hookd.target.plugins.accounts import Accounts
from hookd.target.plugins.background import Background
from hookd.target.plugins.core_metrics import CoreMetrics
from hookd.target.plugins.governor import Governor
from hookd.target.plugins.host import PluginHost
from hookd.target.plugins.incidents import Incidents
from hookd.target.plugins.isolation import Readmission, Refusals
from hookd.target.plugins.lifecycle_hooks import LifecycleHooks, PluginTicks
from hookd.target.plugins.listeners import Registry
from hookd.target.plugins.loading import Loading
from hookd.target.plugins.notifier import Notifier
from hookd.target.plugins.plugin_errors import Errors
from hookd.target.plugins.plugin_memory import MemoryWatch
from hookd.target.plugins.routing import Routing
from hookd.target.plugins.slow_hooks import SlowHooks
from hookd.target.plugins.stopper import PluginStopper
from hookd.target.remote.changes import Changes
from hookd.target.remote.evaluate import Evaluations
from hookd.target.remote.marks import Marks
from hookd.target.remote.streams import Streams
from hookd.target.remote.tracing import Tracing
from hookd.target.tensors.statistics import Numeric

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hookd.api.events import Module
    from hookd.target.boot.identity import Process
    from hookd.target.boot.work import Work
    from hookd.target.entry.c_entry import Entry
    from hookd.target.entry.threads import ThreadState
    from hookd.wire.page import PageWriter


@dataclass(frozen=True)
class Parts:
    """The parts of one agent.

    For the code that creates and ends them, and for tests.

    Attributes:
        rest: leaves the interpreter to the training for a while, during long work of hookd's own thread.
    """

    page: PageWriter
    process: Process
    rest: Callable[[], None]
    life: Life
    count: StepCount
    local: Threads
    registry: Registry
    errors: Errors
    lifecycle_hooks: LifecycleHooks
    background: Background
    dispatch: Dispatch
    numeric: Numeric
    models: Models
    portions: Portions
    stopper: PluginStopper
    governor: Governor
    host: PluginHost
    loading: Loading
    changes: Changes
    tracing: Tracing
    streams: Streams
    steps: Steps
    arming: Arming
    boundaries: Boundaries
    slow_hooks: SlowHooks
    memory_watch: MemoryWatch
    trees: Trees
    evaluations: Evaluations
    ticks: Ticks


def assemble(  # noqa: PLR0914, PLR0915  one line for each part
    page: PageWriter, process: Process, *, work: Work, budget: float, clock: Callable[[], int], rest: Callable[[], None]
) -> Parts:
    """Create all parts of an agent, which does nothing until it is armed.

    Hookd and all plugins may take the share `budget` of the step time; sampling keeps it. `clock` returns the time in ns; steps and plugins are measured
    by it. `rest` leaves the interpreter to the training for a while.
    """

    def start_counting(entry: Entry) -> None:
        entry.start_counting(
            calls.for_entry(), local=local, page=page, numeric=numeric, remember=portions.remember_call,
            suspect=portions.suspect, shown=calls.output_shown, hand=portions.queue_counted,
        )  # fmt: skip

    def forget_outputs(modules: Collection[Module]) -> None:  # `portions` is made later
        portions.forget(modules)

    no_frame = dynamo.no_frame()
    life, count, marks = Life(), StepCount(process.step_offset), Marks(process)
    states: dict[int, ThreadState] = {}
    heartbeats = Heartbeats(page)
    local = Threads(heartbeats, states)
    registry = Registry()
    rest()
    core = CoreMetrics(page, budget=budget)
    liveness = Liveness(page)
    # Plugins' errors and reports.
    errors = Errors(registry=registry, page=page, counter=core.plugin_errors, life=life)
    incidents = Incidents(page=page, counter=core.incidents, count=count)
    lifecycle_hooks = LifecycleHooks(page=page, errors=errors, work=work)
    background = Background(errors.failed_in_background, work)
    streams = Streams()
    # Dispatch of events to plugins.
    callbacks = Callbacks(life)
    routing = Routing(registry, lifecycle_hooks.select, errors.fault)
    accounts = Accounts(clock)
    notifier = Notifier(no_frame=no_frame, accounts=accounts, errors=errors)
    phases = Phases(
        page=page, registry=registry, count=count, accounts=accounts, notifier=notifier, listeners=routing.listeners,
        process=process, collectives=PhaseCollectives(page, all_issued),
    )  # fmt: skip
    dispatch = Dispatch(
        accounts=accounts, notifier=notifier, life=life, local=local, registry=registry,
        routing=routing, phases=phases, errors=errors, callback=callbacks.callback,
    )  # fmt: skip
    numeric = Numeric(dispatch.deliver)
    rest()
    models = Models(
        page=page, no_frame=no_frame, clock=clock, life=life, local=local, count=count,
        registry=registry, routing=routing, dispatch=dispatch, numeric=numeric, gauge=core.modules, start_counting=start_counting,
        forget=forget_outputs, rest=rest, gentle=process.method == "attach",
    )  # fmt: skip
    counting = models.counting
    callbacks.hidden = counting.hidden
    portions = Portions(life=life, numeric=numeric, counting=counting, dispatch=dispatch, listeners=routing.listeners)
    # Loading, unloading and stopping of plugins.
    stopper = PluginStopper(counting=counting, core=core, incidents=incidents, marks=marks)
    errors.stop_with(stopper.quarantine)
    governor = Governor(
        budget=budget, clock=clock, registry=registry, dispatch=dispatch, models=models, counting=counting,
        core=core, quarantine=stopper.quarantine,
    )  # fmt: skip
    host = PluginHost(
        page=page, process=process, life=life, local=local, count=count, marks=marks, models=models, counting=counting, portions=portions,
        numeric=numeric, registry=registry, governor=governor, core=core, incidents=incidents, background=background, streams=streams,
    )  # fmt: skip
    loading = Loading(
        process=process, page=page, registry=registry, lifecycle_hooks=lifecycle_hooks, models=models,
        governor=governor, count=count, core=core, stopper=stopper, host=host, rest=rest,
    )  # fmt: skip
    changes = Changes(
        process=process, page=page, life=life, count=count, marks=marks, registry=registry, loading=loading,
        stopper=stopper, core=core, incidents=incidents, own_failure=errors.own_failure,
    )  # fmt: skip
    host.pause_until(changes.is_due)
    tracing = Tracing(process=process, count=count, loading=loading, registry=registry, background=background)
    # Sources of events.
    inference, micro_batches = Inference(), MicroBatches()
    collectives = Collectives(
        process=process,
        life=life,
        set_phase=phases.set_phase,
        callback=callbacks.callback,
        own_failure=errors.own_failure,
    )
    steps = Steps(
        page=page, clock=clock, life=life, local=local, count=count, dispatch=dispatch, names=models.names,
        listeners=routing.listeners, call_visibly=counting.call_visibly, set_phase=phases.set_phase, change=changes.boundary,
        end_passing=portions.end_passing, inference=inference, micro_batches=micro_batches, collectives=collectives,
    )  # fmt: skip
    data = Data(
        page=page, life=life, local=local, call_visibly=counting.call_visibly, begins=steps.begins, set_phase=phases.set_phase,
        callback=callbacks.callback, accounts=dispatch.accounts,
    )  # fmt: skip
    calls = Calls(
        page=page, life=life, local=local, dispatch=dispatch, portions=portions, notifier=notifier, models=models, counting=counting,
        registry=registry, set_phase=phases.set_phase, begins=steps.forward_begins, inference=inference,
        micro_batches=micro_batches, require_alone=changes.require_alone,
    )  # fmt: skip
    arming = Arming(life=life, steps=steps, data=data, models=models)
    boundaries = Boundaries(
        page=page, local=local, count=count, core=core, governor=governor, dispatch=dispatch, portions=portions,
        phases=phases, models=models, tracing=tracing, later=numeric.later, install_late=arming.install_late,
    )  # fmt: skip
    steps.report_to(boundaries)
    host.know_optimizers(steps.optimizers)
    models.plan_with(calls)
    # Work in hookd's own threads.
    slow_hooks = SlowHooks(
        states=states, page=page, registry=registry, governor=governor, turned=counting.act_on_switches,
        errors=errors, count=count,
    )  # fmt: skip
    memory_watch = MemoryWatch(
        registry=registry, gauge=core.plugin_held, incidents=incidents, quarantine=stopper.quarantine
    )
    readmission = Readmission(registry=registry, lifecycle_hooks=lifecycle_hooks, page=page, switch=loading.switch)
    refusals = Refusals(registry=registry, page=page, core=core)
    plugin_ticks = PluginTicks(registry=registry, notifier=notifier, accounts=accounts, lifecycle_hooks=lifecycle_hooks)
    evaluations = Evaluations(
        page=page, life=life, local=local, names=models.names, steps=steps, count=count, incidents=incidents
    )
    acts = (
        models.tick, lambda _: liveness.tick(), lambda _: readmission.tick(), lambda _: memory_watch.tick(), plugin_ticks.tick,
        lambda _: refusals.tick(),
    )  # fmt: skip
    ticks = Ticks(acts, own_failure=errors.own_failure, heartbeats=heartbeats, page=page, dropped=core.series_dropped)
    return Parts(
        page=page, process=process, rest=rest, life=life, count=count, local=local,
        registry=registry, errors=errors, lifecycle_hooks=lifecycle_hooks, background=background, dispatch=dispatch,
        numeric=numeric, models=models, portions=portions, stopper=stopper, governor=governor, host=host,
        loading=loading, changes=changes, tracing=tracing, streams=streams, steps=steps, arming=arming,
        boundaries=boundaries, slow_hooks=slow_hooks, memory_watch=memory_watch, trees=Trees(models, registry), evaluations=evaluations,
        ticks=ticks,
    )  # fmt: skip
