"""Steps without an optimizer of torch, as in `p -= lr * p.grad`.

Such steps call no hook, so they are inferred from the parameters. A step was made if, since the last backward, parameters
were written to (their versions differ), or their gradients were cleared, as code does that writes to `p.data`, which has no
version. Without a backward, gradients may come from `torch.autograd.grad`: then only versions count.

Until an optimizer has stepped, the training may still turn out to have one: it may accumulate a batch, search for a loss
scale, or load a checkpoint. So steps without an optimizer are counted only from BELIEVED of them on, and then all of them.
Backwards without any other sign count as steps only after UNEXPLAINED of them.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.api.passive import attributes_of, entries, modules_in, parameters_of, plainly
from hookd.target.plugins.faults import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from hookd.api.events import Module
    from hookd.target.modeltree.names import Names

WATCHED, MOST = 4, 16
"""Number of parameters that are watched: of each model, the first that are trained; and of all models together."""
SEARCHED = 512
"""Number of parameters of each model that are searched for them."""
UNEXPLAINED = 100
"""Number of backwards without a step after which each forward that follows a backward begins a step."""
BELIEVED = 16
"""Number of steps without an optimizer from which on they are counted."""


_Tensor: Any = torch.Tensor
_is_leaf, _requires_grad, _grad = _Tensor.is_leaf.__get__, _Tensor.requires_grad.__get__, _Tensor.grad.__get__
_version = _Tensor._version.__get__


class ParameterRef(NamedTuple):
    """The module and the name of a parameter.

    It does not refer to the parameter, not even weakly, because then torch could not swap it.
    """

    module: weakref.ref[nn.Module]
    name: str


class ParameterState(NamedTuple):
    """The ids and versions of a trained parameter and its gradient. Those of the gradient are 0 if there is none."""

    parameter: int
    version: int
    gradient: int
    gradient_version: int


class ManualUpdates:
    """Finds steps by looking at some parameters.

    It looks in the training thread, when a forward or a backward begins.

    Args:
        by_backward: whether each forward after a backward begins a step, because this torch has no global optimizer hooks
            (before 2.0). This is also switched on after UNEXPLAINED backwards without a step.
    """

    def __init__(self, *, names: Names, own_failure: Callable[[str, BaseException], None], by_backward: bool) -> None:
        self._names, self._own_failure = names, own_failure
        self._by_backward = by_backward
        self._is_believed = by_backward
        self._seen = 0  # steps that are not counted yet
        self._models: dict[tuple[int, int], Watched] = {}  # by ordinal and root
        self._main = 0  # the model with the most parameters
        self._backwards = 0  # since the last step
        self._had_graph = self._has_backward = self._has_moved = False
        self._called = 0  # ordinal of the model whose call was the last turn, 0 for none

    def forward_begins(self) -> int:
        """Return the number of unreported steps that are over."""
        had_graph, self._had_graph = self._had_graph, torch.is_grad_enabled()
        try:
            self._find()
            if not (self._backwards or had_graph or self._had_graph):
                return 0
            if self._backwards > UNEXPLAINED:
                self._by_backward = self._is_believed = True
            is_over, has_moved = False, False
            for model in self._models.values():
                now = model.read()
                has_moved = has_moved or _have_moved(model.before, now)
                is_over = is_over or _are_cleared(model.after, now)
                model.before = now
        except Failure as failure:  # a parameter may be of any class
            self._own_failure("steps without an optimizer", failure)
            return 0
        self._has_moved = has_moved
        if self._backwards:
            return self._over() if is_over or has_moved or self._by_backward else 0
        return self._over() if has_moved and had_graph else 0

    def backward_begins(self) -> int:
        """Return the same as `forward_begins`, at a backward. Gradients may be cleared after the forward."""
        is_over = False
        try:
            for model in self._models.values():
                model.before = model.read()  # parameters that the forward itself has changed do not make a step
                is_over = is_over or _are_cleared(model.after, model.before)
        except Failure as failure:
            self._own_failure("steps without an optimizer", failure)
            return 0
        return self._over() if is_over and self._backwards else 0

    def backward_done(self) -> None:
        """Record that there are gradients now."""
        self._backwards += 1
        self._has_backward = True
        try:
            for model in self._models.values():
                if not model.refs:
                    model.search()  # the model may have begun to train
                model.after = model.read()
        except Failure as failure:
            self._own_failure("steps without an optimizer", failure)

    def finish(self) -> int:
        """Return the number of unreported steps at the end of the training."""
        steps = self.forward_begins()
        self._is_believed = True
        return steps or self._take_believed()

    def is_turn(self, module: Module) -> bool:
        """Whether the previous call of the largest model stands for a step. It does if no backward has followed it."""
        if self._has_backward or module.root != self._main:
            return False
        last, self._called = self._called, module.root
        if not self._has_moved:
            self._seen = 0  # weights that change only now and then were loaded, not trained
        return last == module.root

    def _over(self) -> int:
        self._backwards = 0
        self._seen += 1
        self._is_believed = self._is_believed or self._seen >= BELIEVED
        return self._take_believed()

    def _take_believed(self) -> int:
        steps, self._seen = (self._seen, 0) if self._is_believed else (0, self._seen)
        return steps

    def _find(self) -> None:
        """Watch new models, and forget those that are gone."""
        live = {(model.ordinal, id(root)): root for model, root in self._names.live_roots()}
        if live.keys() == self._models.keys():
            return
        self._models = {key: watched for key, watched in self._models.items() if key in live}
        room = MOST - sum(len(watched.refs) for watched in self._models.values())
        for key, root in live.items():
            if key not in self._models:
                watched = self._models[key] = Watched(root, max(0, min(WATCHED, room)))
                room -= len(watched.refs)
        # A loss or a metric has no parameters, so it does not count as a model.
        sizes = {ordinal: watched.size for (ordinal, _), watched in self._models.items() if watched.size}
        self._main = max(sizes, key=sizes.__getitem__, default=0)


class Watched:
    """A model and its watched parameters.

    Attributes:
        size: number of its parameters, up to SEARCHED.
        refs: the watched parameters.
        before: their state when the last forward or backward began.
        after: their state at the end of the last backward.
    """

    def __init__(self, root: nn.Module, most: int) -> None:
        self._root, self._most = weakref.ref(root), most
        self.size = 0
        self.refs: list[ParameterRef] = []
        self.before: list[ParameterState | None] = []
        self.after: list[ParameterState | None] = []
        self.search()

    def search(self) -> None:
        """Choose the parameters to watch."""
        root = self._root()
        if root is None or not self._most:
            return
        refs = list(islice(_parameter_refs(root), SEARCHED))
        self.size = len(refs)
        with plainly():
            self.refs = list(islice((ref for ref in refs if _state_of(ref) is not None), self._most))
        self.before = self.after = self.read()

    def read(self) -> list[ParameterState | None]:
        """Return the current state of each watched parameter."""
        with plainly():
            return list(map(_state_of, self.refs))


def _parameter_refs(root: nn.Module) -> Iterator[ParameterRef]:
    for _, module in modules_in(root):
        yield from (ParameterRef(weakref.ref(module), name) for name in parameters_of(module))


def _state_of(ref: ParameterRef) -> ParameterState | None:
    """Return a parameter's state; None if it is gone, not trained, or now replaced by a computed tensor."""
    module = ref.module()
    parameter = None if module is None else entries(attributes_of(module).get("_parameters")).get(ref.name)
    if parameter is None or not (_requires_grad(parameter) and _is_leaf(parameter)) or _Tensor.is_inference(parameter):
        return None
    grad = _grad(parameter)
    if grad is None or _Tensor.is_inference(grad):
        return ParameterState(id(parameter), _version(parameter), 0, 0)
    return ParameterState(id(parameter), _version(parameter), id(grad), _version(grad))


def _have_moved(before: list[ParameterState | None], now: list[ParameterState | None]) -> bool:
    """Whether any parameter was written to. A parameter that was replaced by another tensor does not count."""
    both = ((then, one) for then, one in zip(before, now) if then is not None and one is not None)
    return any(then.parameter == one.parameter and then.version != one.version for then, one in both)


def _are_cleared(after: list[ParameterState | None], now: list[ParameterState | None]) -> bool:
    """Whether a gradient of the last backward was removed, replaced or written to.

    A parameter that was replaced by another one counts if the new one has no gradient.
    """
    both = ((then, one) for then, one in zip(after, now) if then is not None and one is not None)
    return any(
        then.gradient and (then[2:] != one[2:] if then.parameter == one.parameter else not one.gradient)
        for then, one in both
    )
