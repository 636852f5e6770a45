"""Which plan each module has, and how a module that nobody knows yet gets one. Runs in the target."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hookd.agent.faults import Failure
from hookd.agent.names import Model, Names, Ref
from hookd.agent.patch import SKIP, ClassPatch, Replaced, is_dynamo_compiling, plain_call, skip_frames
from hookd.agent.plan import compile_plan, source
from hookd.agent.seen import Seen
from hookd.hookspecs import MODULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.agent.listeners import Listener
    from hookd.agent.session import Session
    from hookd.agent.threads import ThreadState
    from hookd.events import Module

_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_compiler = getattr(torch, "compiler", torch)
_PORTION = 8
"""So many modules are learnt at one call of a root at least;"""
_MODULES_PER_S = 200
"""and so many for each second since the call before: a share of the time that does not depend on the step's length."""
_FORGET_AFTER_S = 60.0
"""How long the series of a model that is gone wait for a model of the same shape."""


class Models:
    """All that the patched `__call__` needs: plans by id(module), and the way to learn a new model.

    Args:
        gentle: learn a model in portions, call by call of its root. A module costs about half a millisecond until it
            has been observed for the first time (its name, its plan, its series), and a training that was attached to
            in its middle should not pay for all of a deep model in one step.

    Attributes:
        learning: the models of which a portion is still to be learnt.
        lock: held while plans are made or taken away.
        seen: what is seen of each module.
    """

    def __init__(self, session: Session, *, gentle: bool = False) -> None:
        self._session = session
        self._gentle = gentle
        self.learning: set[Model] = set()
        self.plans: dict[int, Any] = {}
        self.names = Names(session.page.module, self._forget)
        self.patch = ClassPatch(self.plans, self._make_missing())
        self._makers: dict[tuple[Any, ...], Any] = {}
        self._heard: dict[tuple[str, int], list[Listener]] = {}
        self._wanted: dict[tuple[int, int], Any] = {}
        self._ignored: dict[int, Ref] = {}
        self._died_at: dict[int, float] = {}
        self._parameters: dict[int, tuple[Any, Any]] = {}
        self._train: Replaced | None = None
        self.lock = threading.RLock()
        self.seen = Seen(self, session.core.modules)

    # -- install and restore

    def install(self) -> None:
        """Patch `nn.Module.__call__` and `nn.Module.train`."""
        self._train = Replaced(nn.Module, "train", self._wrap_train)
        self.patch.install()

    def restore(self) -> tuple[bool, list[str]]:
        """Undo `install`.

        Returns:
            Whether `__call__` is the original again, and what could not be undone.
        """
        restored = self.patch.restore()
        residue = [] if restored else ["nn.Module.__call__: somebody has patched on top of us; ours passes through"]
        if self._train is not None and not self._train.restore():
            residue.append("nn.Module.train: somebody has patched on top of us")
        with self.lock:  # a training thread that is learning a model right now must not hook what was unhooked
            # Dynamo guards on the plan of a compiled module that has hooks of its own: what it has traced must not change.
            compiled = {key for model in self.names.models for key in model.compiled}
            for key in [key for key in self.plans if key not in compiled]:
                self.plans.pop(key, None)
            self._ignored.clear()
            self.learning.clear()
            for _, handle in self._parameters.values():
                handle.remove()
            self._parameters.clear()
            self.seen.restore()
        return restored, residue

    def restore_in_child(self) -> None:
        """Undo `install` in a forked child, where another thread of the parent's may have held the lock."""
        self.lock = threading.RLock()
        self.restore()

    # -- what the patched __call__ asks

    def _make_missing(self) -> Callable[..., Any]:
        """Make what is called for a module without a plan; after a detach it is a bare pass-through."""
        text = f"def plain(self, args, kwargs):\n    return {plain_call(nn.Module.__dict__['__call__'])}\n"
        namespace: dict[str, Any] = {"original": nn.Module.__dict__["__call__"]}
        exec(compile(text, "<hookd plain>", "exec"), namespace)
        plain = namespace["plain"]
        skip_frames(plain.__code__)
        holder = weakref.ref(self)

        def missing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            models = holder()
            plan = None
            if models is not None and models._session.is_live:
                plan = models._plan_for(module)
            return plain(module, args, kwargs) if plan is None or plan is SKIP else plan(module, args, kwargs)

        skip_frames(missing.__code__)
        return missing

    def _plan_for(self, module: nn.Module) -> Any:
        """Learn a module that has no plan, if this is the moment for it; dynamo must not compile what we do here."""
        frame = self._session.namespace["no_frame"](None)
        try:
            thread = self._session.local.thread
            if thread.busy or _graph_task() != -1 or getattr(_compiler, "_is_compiling_flag", False):
                return None
            with self.lock:
                if not self._session.is_live:
                    return None
                if thread.top is not None:
                    self._learn_inside(module, thread)
                elif not _is_in_flight():
                    self._learn_root(module)
            return self.plans.get(id(module))
        except Failure as failure:
            self._session.own_failure("learning a module", failure)
            return None
        finally:
            self._session.namespace["no_frame"](frame)

    def _learn_root(self, root: nn.Module) -> None:
        known = self.names.known.get(id(root))
        if known is None:
            model = self.names.learn(root)
            if not self._may_wait():
                self.names.proceed(model)
            if model.walk is None:
                self._plan_model(model)
            else:
                self.learning.add(model)
                self._plan_modules(self.names.proceed(model, 1))  # `learn_on` follows: the root's call begins now
        else:
            self.plans[id(root)] = self._plan(id(root))

    def _may_wait(self) -> bool:
        """Whether a model may be learnt in portions: what changes the training must do so everywhere from one step on."""
        return self._gentle and not any(one.mutates for hook in MODULE for one in self._session.registry.ordered(hook))

    def learn_on(self) -> None:
        """Learn the next portions of the models that are being learnt; at the beginning of a root's call."""
        frame = self._session.namespace["no_frame"](None)
        try:
            with self.lock:
                for model in list(self.learning):
                    self._proceed(model)
        except Failure as failure:
            self._session.own_failure("learning a model", failure)
        finally:
            self._session.namespace["no_frame"](frame)

    def _proceed(self, model: Model) -> None:
        now = time.monotonic()
        since_s = min(now - model.proceeded_at, 1.0) if model.proceeded_at else 0.0
        model.proceeded_at = now
        self._plan_modules(self.names.proceed(model, max(_PORTION, int(_MODULES_PER_S * since_s))))
        if model.walk is None:
            self.learning.discard(model)
            self._hook_parameters(model)
            self.seen.learnt(model)

    def _learn_inside(self, module: nn.Module, thread: ThreadState) -> None:
        """Learn a module that was added to its model after the model was learnt, or that belongs to none.

        Looking through a model is dear, and a module made inside a `forward` is not in it: the less often there was
        something new, the rarer the look.
        """
        for model, root in self.names.live_roots():
            if model in self.learning:
                continue
            if model.ordinal == thread.stack()[0].root and model.rescan_at <= self._session.steps.done:
                new = self.names.extend(model, root)
                model.rescan_wait = 1 if new else min(2 * model.rescan_wait, 1024)
                model.rescan_at = self._session.steps.done + model.rescan_wait
                if new:
                    self._plan_model(model)
                if id(module) not in self.names.known:
                    self._ignore(module)

    def _ignore(self, module: nn.Module) -> None:
        ref = Ref(module, self._ignored_died)
        ref.key = id(module)
        self._ignored[id(module)] = ref
        self.plans[id(module)] = SKIP

    def _ignored_died(self, ref: Ref) -> None:
        if self._ignored.get(ref.key) is ref:
            del self._ignored[ref.key]
            self.plans.pop(ref.key, None)

    def _forget(self, key: int) -> None:
        self.plans.pop(key, None)

    # -- plans

    def replan(self) -> None:
        """Make all plans anew: a plugin came or went."""
        with self.lock:
            self._heard.clear()
            if not self._may_wait():
                for model in self.learning:
                    self.names.proceed(model)
                self.learning.clear()
            for model in list(self.names.models):
                self._plan_model(model)

    def _plan_model(self, model: Model) -> None:
        self._plan_modules([key for key, (_, owner, _) in list(self.names.known.items()) if owner is model])
        self._hook_parameters(model)
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
        heard = tuple(one for hook in sorted(MODULE) for one in self.listeners(hook, module))
        if not heard and module.depth:
            return SKIP
        wrapped = key in model.wrapped or not module.depth
        make = self._maker(heard, wrapped=wrapped, recompute=False, metered=False)
        others = (self._other(module, heard, wrapped=wrapped, recompute=recompute) for recompute in (True, False))
        return self.seen.plan(module, make(module, float(module.id), *others))

    def _other(
        self, module: Module, heard: tuple[Listener, ...], *, wrapped: bool, recompute: bool
    ) -> Callable[..., Any]:
        """Give what a recompute calls, or a step that is metered; its plan is made when the first one comes."""
        plans: dict[bool, Any] = {}
        namespace = self._session.namespace

        def other(self_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            metered = namespace["accounting"]
            plan = plans.get(metered)
            if plan is None:
                plan = plans[metered] = self._other_plan(module, heard, wrapped, recompute=recompute, metered=metered)
            return plan(self_, args, kwargs)

        skip_frames(other.__code__)
        return other

    def _other_plan(
        self, module: Module, heard: tuple[Listener, ...], wrapped: bool, *, recompute: bool, metered: bool
    ) -> Any:
        frame = self._session.namespace["no_frame"](None)
        try:
            with self.lock:  # a recompute may come in any of autograd's threads
                make = self._maker(heard, wrapped=wrapped, recompute=recompute, metered=metered)
                return make(module, float(module.id), None, None)
        finally:
            self._session.namespace["no_frame"](frame)

    def _maker(self, heard: tuple[Listener, ...], *, wrapped: bool, recompute: bool, metered: bool) -> Any:
        """Compile the plans of one shape."""
        shape = (*((one.plugin, one.hook) for one in heard), wrapped, recompute, metered)
        make = self._makers.get(shape)
        if make is None:
            text = source(heard, plain_call(self.patch.original), recompute=recompute, wrapped=wrapped, metered=metered)
            exec(compile_plan(text), self._session.namespace)
            make = self._makers[shape] = self._session.namespace.pop("make")
            skip_frames(_inner_code(make))
        return make

    def listeners(self, hook: str, module: Module | None) -> list[Listener]:
        """Give who listens to a hook, at a module where it is a module's hook, in the order of calling."""
        key = (hook, module.id if module is not None else 0)
        heard = self._heard.get(key)
        if heard is None:
            heard = self._session.registry.ordered(hook)
            if module is not None:
                heard = [one for one in heard if self._wants(one, module)]
            self._heard[key] = heard
        return heard

    def _wants(self, one: Listener, module: Module) -> bool:
        if one.hook in ("root_forward", "root_forward_pre") and module.depth:
            return False
        key = (one.plugin, module.id)
        if key not in self._wanted:
            self._wanted[key] = self._select(one.plugin, module)
        wanted = self._wanted[key]
        return one.hook in wanted if isinstance(wanted, frozenset) else wanted

    def _select(self, number: int, module: Module) -> bool | frozenset[str]:
        """Ask a plugin whether it wants a module: all hooks of it, none, or those named."""
        entry = self._session.registry.entries[number]
        plugin: Any = entry.plugin
        if not hasattr(plugin, "select"):
            return True
        if entry.state not in ("active", "waiting"):
            return False
        try:
            wanted = plugin.select(module)
            return frozenset(wanted) if isinstance(wanted, (set, frozenset, tuple, list)) else bool(wanted)
        except Failure as failure:
            self._session.dispatch.fault(number, "select", failure)
            return False

    # -- parameters

    def _hook_parameters(self, model: Model) -> None:
        if not self._session.registry.ordered("param_grad"):
            return
        root = model.ref() if model.ref is not None else None
        if root is None or not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            return
        for key, (ref, owner, module) in list(self.names.known.items()):
            held = ref()
            if owner is model and held is not None:
                for name, parameter in held._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        self._hook_parameter(parameter, module, name, key)

    def _hook_parameter(self, parameter: Any, module: Module, name: str, _key: int) -> None:
        known = self._parameters.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return
        prefix = "" if not module.depth else f"{module.name}."

        def accumulated(param: Any) -> None:
            session = self._session
            if session.is_live and param.grad is not None:
                values = {"module": module, "name": prefix + name, "param": param, "grad": param.grad}
                session.dispatch.emit("param_grad", values, module)

        handle = parameter.register_post_accumulate_grad_hook(accumulated)
        self._parameters[id(parameter)] = (weakref.ref(parameter), handle)

    # -- train() and eval()

    def _wrap_train(self, original: Any) -> Callable[..., Any]:
        def train(self: nn.Module, mode: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
            if is_dynamo_compiling() or not session.is_live:
                return original(self, mode)
            thread = session.local.thread
            thread.switching += 1
            try:
                result = original(self, mode)
            finally:
                thread.switching -= 1
            if not thread.switching:
                models._switched(self, mode)
            return result

        session, models = self._session, self
        return train

    def _switched(self, module: nn.Module, training: bool) -> None:  # noqa: FBT001
        known = self.names.known.get(id(module))
        if known is not None:
            self._session.dispatch.emit("mode", {"module": known[2], "training": training})

    # -- from time to time

    def boundary(self, thread: ThreadState) -> None:
        """At a step boundary: a lost signal may have left a stale stack."""
        if thread.top is not None and not _is_in_flight():
            thread.top = None
        self.seen.look(is_training_thread=True)

    def tick(self, now_s: float) -> None:
        """Forget models that have been gone for a while, and publish what has changed."""
        self.seen.look(is_training_thread=False)
        dead = self.names.dead()
        self._died_at = {m.ordinal: self._died_at.get(m.ordinal, now_s) for m in dead}
        for model in dead:
            if now_s - self._died_at[model.ordinal] > _FORGET_AFTER_S:
                self._drop(model)

    def _drop(self, model: Model) -> None:
        with self.lock:
            if model.alive:
                return
            self.names.drop(model)
            self.learning.discard(model)
        for module in model.names.values():
            for entry in list(self._session.registry.entries.values()):
                for metric in entry.context.metrics:
                    metric.remove_module(module.name)
                self._wanted.pop((entry.number, module.id), None)
            self._session.page.retire_module(module.id)
        self._heard.clear()
        self._session.page.compact()
        self.seen.forget(model.names.values())
        self.seen.publish()

    def steps_done(self) -> int:
        """Give the steps since the attach."""
        return self._session.steps.done


def _inner_code(make: Any) -> Any:
    return next(const for const in make.__code__.co_consts if hasattr(const, "co_code"))


def _is_in_flight() -> bool:
    """Whether this thread is inside a module's call: one that was under way when we arrived, or an unnamed one."""
    codes = {nn.Module._call_impl.__code__}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False
