"""Which plan each module has, and how a module that nobody knows yet gets one. Runs in the target."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd.api.hookspecs import MODULE
from hookd.target.entry.c_entry import ROOM, CannotEnterError, Entry
from hookd.target.entry.counting import Counting
from hookd.target.entry.patch import SKIP, ClassPatch, bare_of, is_in_flight
from hookd.target.entry.plan import Plan
from hookd.target.modeltree.mode import Mode
from hookd.target.modeltree.module_coverage import Seen
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
    from hookd.target.plugins.listeners import Entry as PluginEntry
    from hookd.target.plugins.listeners import Registry
    from hookd.target.plugins.routing import Audience
    from hookd.target.tensors.statistics import Numeric
    from hookd.wire.page import PageWriter

_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_compiler = getattr(torch, "compiler", torch)
MOST = 2048
"""A model of more modules than these is too large to observe them all: each costs 7 KB and a millisecond to learn."""
OF_LARGER = 512
"""Of such a one so many are observed, those nearest to its root: still several times what is served of a target."""
_PORTION = 8
"""So many modules are learnt at one call of a root at least;"""
_MODULES_PER_S = 200
"""and so many for each second since the call before: a share of the time that does not depend on the step's length;"""
_LARGEST_PORTION = 24
"""but no more than these, however long a step is: it would be noticed;"""
_PORTION_NS = 2_000_000
"""nor any more once they have taken so long."""
_LEFT_AT_ONCE = 1024
"""So many modules that are not to be observed are noted in one outermost call, at 5 to 25 us each (cold)."""
_FORGET_AFTER_S = 60.0
"""How long the series of a model that is gone wait for a model of the same shape."""


class Models:
    """All that the patched `__call__` needs: plans by id(module), and the way to learn a new model.

    Args:
        no_frame: switches dynamo's frame evaluation.
        count: of steps.
        audience: knows who listens at which module.
        gauge: `hookd_modules`.
        host: has the entry count calls; called at each `install`.
        forget: is told of the modules of a model that is gone.
        rest: lets the training have the interpreter for a while.
        gentle: learn a model in portions, call by call of its root. A module costs about half a millisecond until it
            has been observed for the first time (its name, its plan, its series), and a training that was attached to
            in its middle should not pay for all of a deep model in one step.

    Attributes:
        learning: the models of which a portion is still to be learnt, or left out.
        closed: their ordinals.
        counting: says to the entry in C what to do.
        lock: held while plans are made or taken away.
        seen: what is seen of each module.
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
        audience: Audience,
        dispatch: Dispatch,
        numeric: Numeric,
        gauge: Gauge,
        host: Callable[[Entry], None],
        forget: Callable[[Collection[Module]], None],
        rest: Callable[[], None],
        gentle: bool = False,
    ) -> None:
        self._page, self._no_frame, self._clock = page, no_frame, clock
        self._life, self._local, self._count, self._registry = life, local, count, registry
        self._dispatch, self._numeric = dispatch, numeric
        self._host, self._forget_outputs, self._rest = host, forget, rest
        self._gentle = gentle
        self._calls: Calls | None = None
        self.learning: set[Model] = set()
        self.closed: set[int] = set()
        self.names = Names(page.module, self._forget)
        self.patch = call_patch(self._make_missing())
        self.plans = self.patch.plans
        self.counting = Counting(self.patch, registry=registry, dispatch=dispatch, numeric=numeric)
        self._is_deep_told = False
        self.audience = audience
        self._ignored: dict[int, Ref] = {}
        self._died_at: dict[int, float] = {}
        self._parameters = Parameters(names=self.names, life=life, registry=registry, dispatch=dispatch)
        self._mode = Mode(names=self.names, life=life, local=local, dispatch=dispatch)
        self.lock = RLock()
        self.seen = Seen(self, names=self.names, count=count, gauge=gauge, entrance=dispatch.entrance)

    def plan_with(self, calls: Calls) -> None:
        """Set what plans do beside telling plugins, which itself asks for models here."""
        self._calls = calls

    # -- install and restore

    def prepare(self) -> None:
        """Do before `install` what takes longest in it."""
        self.counting.prepare()
        self._rest()

    def install(self) -> None:
        """Watch calls of `nn.Module.__call__`, and patch `nn.Module.train`."""
        self._mode.install()
        self.counting.begin(self._host)
        self.patch.install()

    def register(self) -> None:
        """Tell dynamo of the patch; again from time to time, for it may be imported later."""
        self.patch.register()

    def restore(self) -> tuple[bool, list[str]]:
        """Undo `install`.

        Returns:
            Whether `__call__` is the original again, and what could not be undone.
        """
        self._numeric.ask_again()
        left = self.patch.restore()
        residue = [*([left] if left else []), *self._mode.restore()]
        with self.lock:  # a training thread that is learning a model right now must not hook what was unhooked
            self.plans.clear()
            self._ignored.clear()
            self.learning.clear()
            self.closed.clear()
            self._parameters.restore()
            self.seen.restore()
        return not left, residue

    def restore_in_child(self) -> None:
        """Undo `install` in a forked child, where another thread of the parent's may have held the lock."""
        self.lock = RLock()
        self.restore()

    # -- what the patched __call__ asks

    def _make_missing(self) -> Callable[..., Any]:
        """Make what is called for a module without a plan; after a detach it is a bare pass-through."""
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
                return models.counting.aloud_of(module)(*args, **kwargs)
            return bare(module)(*args, **kwargs)

        return missing

    def _plan_for(self, module: nn.Module) -> Any:
        """Learn a module that has no plan, if this is the moment for it; dynamo must not compile what we do here."""
        frame = self._no_frame(None)
        try:
            thread = self._local.thread
            if thread.busy or _graph_task() != -1 or getattr(_compiler, "_is_compiling_flag", False):
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
            for inside in self.names.below(root, MOST):  # it takes their place, and its modules their names in it
                self._end(inside)
            model = self.names.learn(root, OF_LARGER if self._may_leave_out() and has_more(root, MOST) else None)
            self._tell_if_cut(model)
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
        """Whether a model may be learnt in portions: what changes the training must do so everywhere from one step on."""
        return self._gentle and self._may_leave_out()

    def _may_leave_out(self) -> bool:
        return not any(one.mutates for hook in MODULE for one in self._registry.ordered(hook))

    def _tell_if_cut(self, model: Model) -> None:
        if model.is_cut:
            text = (
                f"{model.signature[0].__name__} has more than {MOST} modules: the {OF_LARGER} nearest to its root are "
            )
            rest = "observed, and what happens in the others is that of the module that they are in"
            self._page.log("warning", text + rest)

    @property
    def is_learning(self) -> bool:
        """Whether a portion of any model is still to be learnt."""
        return any(model.walk is not None for model in list(self.learning))

    def learn_on(self) -> None:
        """Learn the next portions of the models that are being learnt; at the beginning of a root's call."""
        frame = self._no_frame(None)
        try:
            with self.lock:
                for model in list(self.learning):
                    if model.walk is not None:
                        self._proceed(model)
                    else:  # the next of what is left out may come
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
            self.seen.learnt(model)

    def _learn_inside(self, module: nn.Module, thread: ThreadState) -> None:
        """Learn a module that was added to its model after the model was learnt, or that belongs to none.

        Looking through a model is dear, and a module made inside a `forward` is not in it: the less often there was
        something new, the rarer the look.
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
        """Note that a module is not to be observed; after many, the rest are for the next outermost call."""
        self._ignore(module)
        self.seen.note_left_out()
        model.left_now += 1
        if model.left_now >= _LEFT_AT_ONCE:
            self._close(model)

    def _close(self, model: Model) -> None:
        """Let a model's unknown modules be, until its root is called again."""
        self.learning.add(model)
        self.closed.add(model.ordinal)

    def _open(self, model: Model) -> None:
        model.left_now = 0
        self.learning.discard(model)
        self.closed.discard(model.ordinal)

    def size(self) -> int:
        """Return how many modules are known."""
        return len(self.names.known)

    def states(self) -> list[tuple[Module, str]]:
        """Return each module with what is seen of it."""
        return self.seen.states()

    def left_out(self) -> int:
        """Give how many modules have been called and are not observed: the rest of a large model, and those of none."""
        return len(self._ignored)

    def _ignore(self, module: nn.Module) -> None:
        ref = Ref(module, self._ignored_died)
        key = ref.key = id(module)  # one number for all, there may be a hundred thousand
        self._ignored[key] = ref
        self.plans[key] = SKIP

    def _ignored_died(self, ref: Ref) -> None:
        if self._ignored.get(ref.key) is ref:
            del self._ignored[ref.key]
            self.plans.pop(ref.key, None)

    def _forget(self, key: int) -> None:
        self.plans.pop(key, None)

    # -- plans

    def prepare_plugin(self, entry: PluginEntry) -> None:
        """Ask a new plugin for the modules that are known; raises as `Audience.prepare` does."""
        self.audience.prepare(entry, [module for _, _, module in list(self.names.known.values())])

    def replan(self) -> None:
        """Make all plans anew: a plugin came or went."""
        with self.lock:
            self.audience.changed()
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
        """Name what was left out: what changes the training does so everywhere."""
        for model, root in self.names.live_roots():
            if model.is_cut:
                model.most = None
                for key in self.names.extend(model, root):
                    self._ignored.pop(key, None)

    def _plan_model(self, model: Model) -> None:
        self._plan_modules([key for key, (_, owner, _) in list(self.names.known.items()) if owner is model])
        self._parameters.hook(model)
        self.seen.learnt(model)

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
        if module.depth and not self.audience.of_calls(module):
            return SKIP
        return self.seen.plan(module, self._made(key, model, module).run)

    def _made(self, key: int, model: Model, module: Module) -> Plan:
        assert self._calls is not None, "plan_with"
        is_wrapped = key in model.wrapped or not module.depth
        counting = self.counting
        shape = counting.shape(counting.heard(self.audience.of_calls(module)))
        plan = Plan(self._calls, module, shape, is_wrapped=is_wrapped)
        if not is_wrapped:
            plan.counted = counting.counted(module, shape)
        return plan

    # -- from time to time

    def step_over(self, thread: ThreadState, *, in_call: bool) -> None:
        """Look what is seen; outside of the call that begins a step a lost signal may have left a stale stack."""
        if not in_call and thread.top is not None and not is_in_flight():
            thread.top = None
        self.seen.look(is_training_thread=True)

    def tick(self, now_s: float) -> None:
        """Forget models that have been gone for a while, and publish what has changed."""
        self._tell_if_deep()
        self.seen.look(is_training_thread=False)
        dead = self.names.dead()
        self._died_at = {m.ordinal: self._died_at.get(m.ordinal, now_s) for m in dead}
        for model in dead:
            if now_s - self._died_at[model.ordinal] > _FORGET_AFTER_S:
                self._drop(model)

    def _tell_if_deep(self) -> None:
        """Log once that calls were not observed for want of room."""
        if self.counting.too_deep() and not self._is_deep_told:
            self._is_deep_told = True
            self._page.log(
                "warning",
                f"some calls are not observed: fewer than {ROOM} levels were left to Python's recursion limit "
                f"({sys.getrecursionlimit()}), or they were more than 1 MiB of stack deep; hookd could have ended the training",
            )

    def _drop(self, model: Model) -> None:
        with self.lock:
            if not model.alive:
                self._end(model)

    def _end(self, model: Model) -> None:
        """Let go of a model and of all that was counted under its names."""
        self.names.drop(model)
        self._open(model)
        self._parameters.forget(model)
        names = {module.name for module in model.names.values()}
        for entry in self._registry:
            for metric in entry.context.metrics:
                metric.remove_modules(names)
            entry.context.forget_modules([module.id for module in model.names.values()])
        self._forget_outputs(model.names.values())
        for module in model.names.values():
            self._page.retire_module(module.id)
        self.audience.forget(model.names.values())
        self._page.compact()
        self.seen.forget(model.names.values())
        self.seen.publish()


def call_patch(missing: Callable[..., Any]) -> Entry | ClassPatch:
    """Return what sees the calls of modules: the entry, or the patch in Python where that cannot be."""
    try:
        return Entry.load(missing)
    except CannotEnterError as why:
        return ClassPatch(missing, str(why))
