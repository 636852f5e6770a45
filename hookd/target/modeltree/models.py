"""The plans of modules, and how an unknown module gets one."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd.api.hookspecs import MODULE
from hookd.target.entry.c_entry import RECURSION_RESERVE, CannotEnterError, Entry
from hookd.target.entry.counting import Counting
from hookd.target.entry.patch import SKIP, ClassPatch, bare_of, is_in_flight
from hookd.target.entry.plan import Plan
from hookd.target.entry.threads import graph_task
from hookd.target.modeltree.mode import Mode
from hookd.target.modeltree.module_coverage import Coverage
from hookd.target.modeltree.names import Model, Names, Ref, has_more
from hookd.target.modeltree.parameters import Parameters
from hookd.target.plugins.faults import Failure
from hookd.wire.originals import RLock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hookd.api.events import Module
    from hookd.api.metrics import Gauge
    from hookd.target.boot.arming import Life
    from hookd.target.entry.calls import Calls
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.events.step_count import StepCount
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.target.plugins.routing import Routing
    from hookd.target.tensors.statistics import Numeric
    from hookd.wire.page import PageWriter

_compiler = getattr(torch, "compiler", torch)
MOST = 2048
"""The most modules of a model that is observed whole: learning a module costs 7 KB and a millisecond."""
OF_LARGER = 512
"""Number of modules that are observed in a larger model, those nearest to its root: still several times the number served."""
_PORTION = 8
"""The fewest modules learnt in one call of a root, while the time allows it."""
_MODULES_PER_S = 200
"""Modules learnt per second since the last call: a share of the time that does not depend on the step's length."""
_LARGEST_PORTION = 24
"""The most modules learnt in one call of a root, however long a step is: more would be noticed."""
_PORTION_NS = 2_000_000
"""A portion ends after this time."""
_LEFT_AT_ONCE = 1024
"""The most unobserved modules that are recorded in one outermost call, at 5 to 25 us each with cold caches."""
_FORGET_AFTER_S = 60.0
"""How long the series of a model that is gone are kept for a new model of the same shape."""


class Models:
    """The plans for the patched `__call__`, by id(module), and the learning of new models.

    Args:
        no_frame: switches dynamo's frame evaluation.
        gauge: `hookd_modules`.
        start_counting: makes the entry count calls; called at each `install`.
        forget: called with the modules of a model that is gone.
        rest: yields the interpreter to the training for a while.
        gentle: learn a model in portions, one at each call of its root. A module costs about half a millisecond until it
            has been observed for the first time (its name, its plan, its series), and a running training should not pay
            for all of a deep model in one step.

    Attributes:
        learning: the models with a portion that is still to be learnt, or left out.
        closed: their ordinals.
        lock: held while plans are made or removed.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        no_frame: Callable[[Any], Any],
        clock: Callable[[], int],
        life: Life,
        local: Threads,
        count: StepCount,
        registry: Registry,
        routing: Routing,
        dispatch: Dispatch,
        numeric: Numeric,
        gauge: Gauge,
        start_counting: Callable[[Entry], None],
        forget: Callable[[Collection[Module]], None],
        rest: Callable[[], None],
        gentle: bool = False,
    ) -> None:
        self._page, self._no_frame, self._clock = page, no_frame, clock
        self._life, self._local, self._count, self._registry = life, local, count, registry
        self._dispatch, self._numeric = dispatch, numeric
        self._start_counting, self._forget_outputs, self._rest = start_counting, forget, rest
        self._gentle = gentle
        self._calls: Calls | None = None
        self.learning: set[Model] = set()
        self.closed: set[int] = set()
        self.names = Names(page.module, self._forget)
        self.observer = call_observer(self._make_missing())
        self.plans = self.observer.plans
        self.counting = Counting(self.observer, registry=registry, dispatch=dispatch, numeric=numeric)
        self._is_deep_logged = False
        self.routing = routing
        self._ignored: dict[int, Ref] = {}
        self._died_at: dict[int, float] = {}
        self._parameters = Parameters(names=self.names, life=life, registry=registry, dispatch=dispatch)
        self._mode = Mode(names=self.names, life=life, local=local, dispatch=dispatch)
        self.lock = RLock()
        self.coverage = Coverage(self, names=self.names, count=count, gauge=gauge, callback=dispatch.callback)

    def plan_with(self, calls: Calls) -> None:
        """Set the calls that plans are made for; they are set late, because they use the models themselves."""
        self._calls = calls

    # -- install and restore

    def prepare(self) -> None:
        """Run the slowest part of `install` in advance."""
        self.counting.prepare()
        self._rest()

    def install(self) -> None:
        """Watch calls of `nn.Module.__call__`, and patch `nn.Module.train`."""
        self._mode.install()
        self.counting.begin(self._start_counting)
        self.observer.install()

    def restore(self) -> tuple[bool, list[str]]:
        """Undo `install`; return whether `__call__` is the original, and descriptions of patches that could not be undone."""
        self._numeric.ask_again()
        left = self.observer.restore()
        residue = [*([left] if left else []), *self._mode.restore()]
        with self.lock:  # a training thread that is learning a model now must not install hooks again
            self.plans.clear()
            self._ignored.clear()
            self.learning.clear()
            self.closed.clear()
            self._parameters.restore()
            self.coverage.restore()
        return not left, residue

    def restore_in_child(self) -> None:
        """Undo `install` in a forked child, where a thread of the parent may have held the lock."""
        self.lock = RLock()
        self.restore()

    # -- for the patched __call__

    def _make_missing(self) -> Callable[..., Any]:
        """Return the function called for a module without a plan; after a detach it just calls the module."""
        bare = bare_of(nn.Module.__dict__["__call__"])
        holder = weakref.ref(self)

        def missing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            models, plan = holder(), None
            if models is None or not models._life.is_live:
                return bare(module)(*args, **kwargs)
            thread = models._local.thread
            if thread.top is None or thread.top[0].root not in models.closed:
                plan = models._plan_for(module)
            if plan is not None and plan is not SKIP:
                return plan(module, args, kwargs)
            if thread.hidden:
                return models.counting.visible_call(module)(*args, **kwargs)
            return bare(module)(*args, **kwargs)

        return missing

    def _plan_for(self, module: nn.Module) -> Any:
        """Learn a module without a plan, if that is possible now, and return its plan."""
        frame = self._no_frame(None)  # dynamo must not compile this code
        try:
            thread = self._local.thread
            if thread.busy or graph_task() != -1 or getattr(_compiler, "_is_compiling_flag", False):
                return None
            with self.lock:
                if not self._life.is_live:
                    return None
                if thread.top is not None:
                    self._learn_inside(module, thread)
                elif not is_in_flight():
                    self._learn_root(module)
            return self.plans.get(id(module))
        except Failure as failure:
            self._dispatch.own_failure("learning a module", failure)
            return None
        finally:
            self._no_frame(frame)

    def _learn_root(self, root: nn.Module) -> None:
        known = self.names.known.get(id(root))
        if known is None:
            for inside in self.names.below(root, MOST):  # the new model replaces them, and names their modules anew
                self._end(inside)
            if (displaced := self.names.displaced(root)) is not None:
                self._end(displaced)
            model = self.names.learn(root, OF_LARGER if self._may_leave_out() and has_more(root, MOST) else None)
            self._log_if_cut(model)
            if not self._may_wait():
                self.names.proceed(model)
            if model.walk is None:
                self._plan_model(model)
            else:
                self._close(model)
                begun_ns = self._clock()
                self._plan_modules(self.names.proceed(model, 1))  # `learn_on` follows: the root's call begins now
                model.had_portion = self._clock() - begun_ns > _PORTION_NS
        else:
            self.plans[id(root)] = self._plan(id(root))

    def _may_wait(self) -> bool:
        """Whether a model may be learnt in portions; not with a mutator, which must start everywhere at the same step."""
        return self._gentle and self._may_leave_out()

    def _may_leave_out(self) -> bool:
        return not any(listener.mutates for hook in MODULE for listener in self._registry.ordered(hook))

    def _log_if_cut(self, model: Model) -> None:
        if model.is_cut:
            text = (
                f"{model.signature[0].__name__} has more than {MOST} modules: the {OF_LARGER} nearest to its root are"
            )
            rest = "observed, and what happens in the others is that of the module that they are in"
            self._page.log("warning", f"{text} {rest}")

    @property
    def is_learning(self) -> bool:
        """Whether a portion of any model is still to be learnt."""
        return any(model.walk is not None for model in list(self.learning))

    def learn_on(self) -> None:
        """Learn the next portion of each model that is being learnt; called at the beginning of a root's call."""
        frame = self._no_frame(None)
        try:
            with self.lock:
                for model in list(self.learning):
                    if model.walk is not None:
                        self._proceed(model)
                    else:  # allow the next unobserved modules to be recorded
                        self._open(model)
        except Failure as failure:
            self._dispatch.own_failure("learning a model", failure)
        finally:
            self._no_frame(frame)

    def _proceed(self, model: Model) -> None:
        if model.had_portion:
            model.had_portion = False
            return
        clock = self._clock
        now_ns = clock()
        since_s = min((now_ns - model.proceeded_ns) / 1e9, 1.0) if model.proceeded_ns else 0.0
        model.proceeded_ns = now_ns
        portion = min(max(_PORTION, int(_MODULES_PER_S * since_s)), _LARGEST_PORTION)
        while portion and model.walk is not None and clock() - now_ns < _PORTION_NS:
            self._plan_modules(self.names.proceed(model, 1))
            portion -= 1
        if model.walk is None:
            self._open(model)
            self._parameters.hook(model)
            self.coverage.learnt(model)

    def _learn_inside(self, module: nn.Module, thread: ThreadState) -> None:
        """Learn a module that was added to its model after the model was learnt, or that belongs to none.

        Scanning a model is expensive, and a module made inside a `forward` is not in it, so each scan that finds nothing new
        doubles the wait until the next one.
        """
        ordinal = thread.stack()[0].root
        for model, root in self.names.live_roots():
            if model.ordinal != ordinal:
                continue
            if model.is_cut:
                self._leave_out(model, module)
            elif model.rescan_at <= self._count.done:
                new = self.names.extend(model, root)
                model.rescan_wait = 1 if new else min(2 * model.rescan_wait, 1024)
                model.rescan_at = self._count.done + model.rescan_wait
                if new:
                    self._plan_model(model)
                if id(module) not in self.names.known:
                    self._ignore(module)

    def _leave_out(self, model: Model, module: nn.Module) -> None:
        """Record that a module is not observed; after `_LEFT_AT_ONCE`, the rest wait for the next outermost call."""
        self._ignore(module)
        self.coverage.note_left_out()
        model.left_now += 1
        if model.left_now >= _LEFT_AT_ONCE:
            self._close(model)

    def _close(self, model: Model) -> None:
        """Ignore a model's unknown modules until its root is called again."""
        self.learning.add(model)
        self.closed.add(model.ordinal)

    def _open(self, model: Model) -> None:
        model.left_now = 0
        self.learning.discard(model)
        self.closed.discard(model.ordinal)

    def size(self) -> int:
        """Return the number of known modules."""
        return len(self.names.known)

    def left_out(self) -> int:
        """Return the number of modules called and not observed: the rest of a large model, and modules outside any model."""
        return len(self._ignored)

    def _ignore(self, module: nn.Module) -> None:
        ref = Ref(module, self._ignored_died)
        key = ref.key = id(module)  # one int object for all uses: there may be a hundred thousand modules
        self._ignored[key] = ref
        self.plans[key] = SKIP

    def _ignored_died(self, ref: Ref) -> None:
        if self._ignored.get(ref.key) is ref:
            del self._ignored[ref.key]
            self.plans.pop(ref.key, None)

    def _forget(self, key: int) -> None:
        self.plans.pop(key, None)

    # -- plans

    def prepare_plugin(self, entry: Loaded) -> None:
        """Ask a new plugin about all known modules; raises what `Routing.prepare` raises."""
        self.routing.prepare(entry, [module for _, _, module in list(self.names.known.values())])

    def replan(self) -> None:
        """Make all plans again after a plugin came or went."""
        with self.lock:
            self.routing.changed()
            self._dispatch.turned()
            old = self.counting.begin_anew()
            if not self._may_wait():
                for model in list(self.learning):
                    self.names.proceed(model)
                    self._open(model)
            if not self._may_leave_out():
                self._take_in()
            for model in list(self.names.models):
                self._plan_model(model)
            self.counting.end(old)

    def _take_in(self) -> None:
        """Name the modules that were left out: a mutator must reach all modules."""
        for model, root in self.names.live_roots():
            if model.is_cut:
                model.most = None
                for key in self.names.extend(model, root):
                    self._ignored.pop(key, None)

    def _plan_model(self, model: Model) -> None:
        self._plan_modules([key for key, (_, owner, _) in list(self.names.known.items()) if owner is model])
        self._parameters.hook(model)
        self.coverage.learnt(model)

    def _plan_modules(self, keys: list[int]) -> None:
        for key in keys:
            known = self.names.known.get(key)
            if known is not None:
                plan = self._plan(key)
                if known[0]() is not None:
                    self.plans[key] = plan

    def _plan(self, key: int) -> Any:
        _, model, module = self.names.known[key]
        if key in model.compiled:
            return SKIP
        if module.depth and not self.routing.of_calls(module):
            return SKIP
        return self.coverage.plan(module, self._made(key, model, module).run)

    def _made(self, key: int, model: Model, module: Module) -> Plan:
        assert self._calls is not None, "plan_with"
        is_wrapped = key in model.wrapped or not module.depth
        counting = self.counting
        group = counting.group(counting.planned(self.routing.of_calls(module)))
        plan = Plan(self._calls, module, group, is_wrapped=is_wrapped)
        if not is_wrapped:
            plan.counted = counting.counted(module, group)
        return plan

    # -- from time to time

    def step_over(self, thread: ThreadState, *, in_call: bool) -> None:
        """Publish changed coverage at a step boundary."""
        # Outside the call that begins a step, an exception of a signal handler may have left a stale stack.
        if not in_call and thread.top is not None and not is_in_flight():
            thread.top = None
        self.coverage.update(is_training_thread=True)
        if self.names.main.is_due and thread.top is None:
            with self.lock:
                for model in self.names.main.review():
                    self._end(model)

    def tick(self, now_s: float) -> None:
        """Forget models that have been gone for a while, and publish changed coverage."""
        self._log_if_deep()
        self.coverage.update(is_training_thread=False)
        dead = self.names.dead()
        self._died_at = {m.ordinal: self._died_at.get(m.ordinal, now_s) for m in dead}
        for model in dead:
            if now_s - self._died_at[model.ordinal] > _FORGET_AFTER_S:
                self._drop(model)

    def _log_if_deep(self) -> None:
        """Log once that calls were too deep to be observed."""
        if self.counting.too_deep() and not self._is_deep_logged:
            self._is_deep_logged = True
            self._page.log(
                "warning",
                f"some calls are not observed: fewer than {RECURSION_RESERVE} levels were left to Python's recursion limit "
                f"({sys.getrecursionlimit()}), or they were more than 1 MiB of stack deep; hookd could have ended the training",
            )

    def _drop(self, model: Model) -> None:
        with self.lock:
            if not model.alive:
                self._end(model)

    def _end(self, model: Model) -> None:
        """Forget a model, and remove all series under its names."""
        self.names.drop(model)
        self._open(model)
        self._parameters.forget(model)
        names = {module.name for module in model.names.values()}
        for entry in self._registry:
            for metric in entry.context.requests.metrics:
                metric.remove_modules(names)
            entry.context.requests.forget_modules([module.id for module in model.names.values()])
        self._forget_outputs(model.names.values())
        for module in model.names.values():
            self._page.retire_module(module.id)
        self.routing.forget(model.names.values())
        self._page.compact()
        self.coverage.forget(model.names.values())
        self.coverage.publish()


def call_observer(missing: Callable[..., Any]) -> Entry | ClassPatch:
    """Return the object that observes module calls: the entry, or the patch in Python if the entry is not possible."""
    try:
        return Entry.load(missing)
    except CannotEnterError as why:
        return ClassPatch(missing, str(why))
