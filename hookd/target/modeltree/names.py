"""The models of a process: their roots, and the names of their modules.

The root of a model is a module that is called while no observed module is running. Nothing is stored on a module. A module
is identified by its `id` alone; a weak reference keeps this correct, because its callback runs before the address can be
reused.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from hookd.api.events import Module
from hookd.api.passive import attributes_of, children_of, groups_of, modules_in, parameters_of
from hookd.target.modeltree.main_root import MainRoot, title_of
from hookd.wire.module_names import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    _Todo = tuple[str, "weakref.ref[nn.Module]", int, bool, bool]


WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes that only wrap a module: class name -> name of the child that is the real module."""


class Ref(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that stores the id of its module."""

    __slots__ = ("key",)
    key: int


class Model:
    """One root, and the known modules below it."""

    def __init__(self, ordinal: int, title: str, signature: tuple[Any, ...]) -> None:
        self.ordinal = ordinal
        self.title = title  # "" for the main root
        self.signature = signature
        self.kind: type[Any] = signature[0]
        self.names: dict[str, Module] = {}
        self.wrapped: set[int] = set()  # ids of nn.Modules inside a wrapper of the same name
        self.compiled: set[int] = set()  # ids of nn.Modules inside a compiled one, whose calls cannot be observed
        self.alive = 0  # number of its modules that are alive
        self.rescan_at = 0  # the step from which it may be scanned for new modules again
        self.rescan_wait = 1  # steps between two scans; doubled whenever nothing new was found
        self.ref: Ref | None = None
        self.had_portion = False  # whether the root alone took the time of a portion
        self.proceeded_ns = 0  # time at which the last portion was named, ns
        self.learnt_at = 0.0  # time at which the last of its modules was named, by the monotonic clock
        self.learnt_step = 0  # number of completed steps at that time
        self.walk: Walk | None = None  # over the modules still to be named; None: all are named
        self.most: int | None = None  # the most modules to name; None: all
        self.is_cut = False  # whether it has more than `most`
        self.left_now = 0  # number of its modules left out since its root was called

    @property
    def prefix(self) -> str:
        """The beginning of the names of its modules: "" for the main root, `#Discriminator.` for another one."""
        return f"#{self.title}." if self.title else ""

    @property
    def root(self) -> Module:
        """The root's own module."""
        return self.names[""]

    @property
    def live_root(self) -> nn.Module | None:
        """The root's nn.Module, None if it has died."""
        return None if self.ref is None else self.ref()

    def has_children_of(self, root: nn.Module) -> bool:
        """Whether its own root had the same children as `root`, as far as they were named in this model."""
        named = {name: child for name, child in children_of(root).items() if name in self.names}
        return bool(named) and all(self.names[name].torch() is child for name, child in named.items())


class Names:
    """All models of this process.

    Args:
        new_id: called with (name, type, ordinal of the root); returns the page's number for a new module.
        forget: called with the id() of an nn.Module that has died.
    """

    def __init__(self, new_id: Callable[[str, str, int], int], forget: Callable[[int], None]) -> None:
        self.models: list[Model] = []
        self.main = MainRoot(self.models)
        self.known: dict[int, tuple[Ref, Model, Module]] = {}
        self._new_id = new_id
        self._forget = forget

    def learn(self, root: nn.Module, most: int | None = None) -> Model:
        """Return a model for a root; `proceed` then names the root and all modules below it, or the `most` nearest to it.

        A root of the same shape as one that has died takes over its names. So a loss module that is created again at every
        step is one series, not one per step, and so is a container created again around models that live on.
        """
        if attributes_of(root).get("_is_replica"):
            return self._learn_replica(root)
        signature = _signature(root)
        model = self._model_inside(root) or self._reborn(root, signature) or self._new(root, signature)
        model.ref = self._ref(root)
        model.most = most
        model.walk = Walk(root, most)
        model.is_cut = model.walk.is_cut
        return model

    def _learn_replica(self, replica: nn.Module) -> Model:
        """Assign the names of the original to a DataParallel replica, which is a new object at every call."""
        for model, root in self.live_roots():
            if type(_innermost(root)) is type(replica):
                self.proceed(model)
                self._name_all(model, Walk(replica, model.most), is_replica=True)
                return model
        model = self._new(replica, _signature(replica))
        model.walk = Walk(replica)
        return model

    def _model_inside(self, root: nn.Module) -> Model | None:
        """Return the model that `root` only wraps: a model called before it was wrapped stays the same model."""
        known = self.known.get(id(_innermost(root)))
        return known[1] if known is not None and known[2] is known[1].root else None

    def displaced(self, root: nn.Module) -> Model | None:
        """Return the model that a new root displaces as the main one; None if it displaces none."""
        main, signature = self.main.model, _signature(root)
        if main is None or self._model_inside(root) is not None or self._reborn(root, signature) is not None:
            return None
        return main if self.main.takes_over(root) else None

    def below(self, root: nn.Module, most: int) -> list[Model]:
        """Return the models whose roots are inside a new root, among its first `most` modules.

        They were called by themselves before, to warm up or to find a shape. A model that `root` only wraps is not included.
        """
        alive = {id(live): model for model, live in self.live_roots()}
        alive.pop(id(_innermost(root)), None)
        if not alive or attributes_of(root).get("_is_replica"):
            return []
        return [alive[id(module)] for _, module in itertools.islice(modules_in(root), most) if id(module) in alive]

    def proceed(self, model: Model, most: int | None = None) -> list[int]:
        """Name the modules of a model that have no name yet, or `most` of them; return their ids, parents first."""
        if model.walk is None:
            return []
        new = self._name_all(model, itertools.islice(model.walk, most))
        if model.walk.is_over:
            model.walk = None
        return new

    def extend(self, model: Model, root: nn.Module) -> list[int]:
        """Name the new modules below a root; return their ids, and those of modules that were compiled since."""
        walk = Walk(root, model.most)
        model.is_cut = walk.is_cut
        return self._name_all(model, walk)

    def _name_all(
        self, model: Model, found: Iterable[tuple[str, nn.Module, bool, bool]], *, is_replica: bool = False
    ) -> list[int]:
        new = []
        for path, module, wrapped, compiled in found:
            if id(module) in self.known:
                owner = self.known[id(module)][1]
                if compiled and id(module) not in owner.compiled:  # it was called before it was compiled
                    owner.compiled.add(id(module))
                    new.append(id(module))
                continue
            named = model.names.get(path)
            if named is None:
                named = self._name(model, path, module)
            ref = self._ref(module)
            if not is_replica:
                named._ref = ref
            if wrapped:
                named.type = type(module).__name__
                model.wrapped.add(id(module))
            if compiled:
                model.compiled.add(id(module))
            model.alive += 1
            self.known[id(module)] = (ref, model, named)
            new.append(id(module))
        return new

    def _name(self, model: Model, path: str, module: nn.Module) -> Module:
        label = model.prefix + (path or ROOT)
        number = self._new_id(label, type(module).__name__, model.ordinal)
        parent = _nearest(model.names, path)
        named = Module(
            label, type(module).__name__, number, model.ordinal, parent, leaf=not attributes_of(module).get("_modules")
        )
        model.names[path] = named
        return named

    def _reborn(self, root: nn.Module, signature: tuple[Any, ...]) -> Model | None:
        """Return the model of a root of the same shape that has died, alone or with all modules below it."""
        for model in self.models:
            if model.signature != signature:
                continue
            if not model.alive or (model.ref is not None and model.live_root is None and model.has_children_of(root)):
                return model
        return None

    def _new(self, root: nn.Module, signature: tuple[Any, ...]) -> Model:
        taken = {model.ordinal for model in self.models}
        ordinal = next(n for n in range(1, len(taken) + 2) if n not in taken)
        is_main = self.main.model is None and self.main.takes_over(root)
        title = "" if is_main else title_of(_innermost(root), (model.title for model in self.models))
        model = Model(ordinal, title, signature)
        if is_main:
            self.main.choose(model)
        self.models.append(model)
        return model

    def _ref(self, module: nn.Module) -> Ref:
        ref = Ref(module, self._died)
        ref.key = id(module)
        return ref

    def _died(self, ref: Ref) -> None:
        known = self.known.get(ref.key)
        if known is not None and known[0] is ref:
            del self.known[ref.key]
            known[1].alive -= 1
            known[1].wrapped.discard(ref.key)
            known[1].compiled.discard(ref.key)
            self._forget(ref.key)

    def name_of(self, module: Any) -> str:
        """Return the name of a known module, and "" for anything else."""
        known = self.known.get(id(module))
        return known[2].name if known is not None and known[0]() is module else ""

    def dead(self) -> list[Model]:
        """Return the models without a living module."""
        return [model for model in self.models if not model.alive]

    def drop(self, model: Model) -> None:
        """Forget a model and its names; its living modules then belong to no model."""
        self.models.remove(model)
        self.main.drop(model)
        for key in [key for key, (_, owner, _) in list(self.known.items()) if owner is model]:
            if self.known.pop(key, None) is not None:
                self._forget(key)

    def live_roots(self) -> Iterator[tuple[Model, nn.Module]]:
        """Yield the models whose roots are alive, with these roots."""
        for model in list(self.models):
            if (root := model.live_root) is not None:
                yield model, root

    def ordered_parameters(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Return the parameters of `optimizer` in the models' order; parameters of no known model come last."""
        remaining = {id(p): p for group in groups_of(optimizer) for p in group["params"]}
        ordered: list[tuple[str, Parameter]] = []
        for model, root in self.live_roots():
            for path, module, _, _ in Walk(root):
                if not remaining:
                    return ordered
                for name, parameter in parameters_of(module).items():
                    if remaining.pop(id(parameter), None) is not None:
                        ordered.append((model.prefix + (f"{path}.{name}" if path else name), parameter))
        return ordered + [(f"parameter {at}", p) for at, p in enumerate(remaining.values())]


def _signature(root: nn.Module) -> tuple[Any, ...]:
    return (type(root), tuple((name, type(child)) for name, child in children_of(root).items()))


def _nearest(names: dict[str, Module], path: str) -> Module | None:
    while path:
        path = path.rpartition(".")[0]
        if path in names:
            return names[path]
    return None


class Walk:
    """An iterator over a root and all modules below it.

    It yields the path, the module, whether it is inside a wrapper of the same path, and whether it is inside a compiled
    module. Parents come first, and each module comes once. It does not use `named_modules`, because a subclass may override
    that, and because wrappers' names are omitted from the paths. A walk may pause for many steps, so it keeps no module alive.

    Args:
        most: the most modules to yield, those nearest to the root, still in the model's order; None: all.

    Attributes:
        is_cut: whether there are more modules.
    """

    def __init__(self, root: nn.Module, most: int | None = None) -> None:
        self._todo: list[_Todo] = [("", weakref.ref(root), 0, False, False)]
        self._seen: set[int] = set()
        self._depth, self._extra = (sys.maxsize, 0) if most is None else _reach(root, most)
        self.is_cut = self._depth < sys.maxsize

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not self._todo

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[str, nn.Module, bool, bool]:
        while self._todo:
            path, ref, depth, wrapped, compiled = self._todo.pop()
            module = ref()
            if module is not None and id(module) not in self._seen:
                self._seen.add(id(module))
                self._descend(path, module, depth, is_compiled=compiled)
                return path, module, wrapped, compiled
        raise StopIteration

    def _descend(self, path: str, module: nn.Module, depth: int, *, is_compiled: bool) -> None:
        inside = _wrapped_child(module)
        is_compiled |= inside == "_orig_mod" or attributes_of(module).get("_compiled_call_impl") is not None
        children = [] if depth > self._depth else list(children_of(module).items())
        if depth == self._depth:
            children = children[: self._extra]
            self._extra -= len(children)
        for name, child in reversed(children):
            same = name == inside
            below = path if same else f"{path}.{name}" if path else name
            self._todo.append((below, weakref.ref(child), depth + 1, same, is_compiled))


def has_more(root: nn.Module, most: int) -> bool:
    """Whether a root and its descendants are more than `most` modules; stops as soon as that is known."""
    return _reach(root, most)[0] < sys.maxsize


def _reach(root: nn.Module, most: int) -> tuple[int, int]:
    """Return the depth down to which all modules are among the `most`, and how many of the next level are."""
    level, seen, depth = [root], {id(root)}, 0
    while level:
        below = {id(child): child for module in level for child in children_of(module).values()}
        # A module may occur in many places, even below itself.
        new = [child for key, child in below.items() if key not in seen]
        if len(seen) + len(new) > most:
            return depth, most - len(seen)
        seen.update(below)
        level, depth = new, depth + 1
    return sys.maxsize, 0


def _innermost(module: nn.Module) -> nn.Module:
    while True:
        name = _wrapped_child(module)
        inside = children_of(module).get(name) if name is not None else None
        if inside is None:
            return module
        module = inside


def _wrapped_child(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPERS:
            return WRAPPERS[kind.__name__]
    return None
