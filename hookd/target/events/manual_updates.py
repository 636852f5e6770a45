"""The steps of a training that no optimizer of torch makes: `p -= lr * p.grad`. Runs in the target.

Nobody calls us there, so it is told by what becomes of the parameters. A step was made when, since the last backward,
parameters were written to (their versions differ), or their gradients were cleared, as is done where `p.data` is written to,
which has no version. Without a backward there may be gradients of `torch.autograd.grad`: then versions alone tell.

Until an optimizer has stepped nobody knows that there is one: a batch may be accumulated, a loss scale looked for, a
checkpoint loaded. So such steps are believed when there were BELIEVED of them, and then all of them; and backwards alone
make none before UNEXPLAINED of them.
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
"""So many parameters of each model are looked at, those that are trained first, and so many in all."""
SEARCHED = 512
"""So many parameters of each model are gone through for them."""
UNEXPLAINED = 100
BELIEVED = 16


_Tensor: Any = torch.Tensor
_is_leaf, _requires_grad, _grad = _Tensor.is_leaf.__get__, _Tensor.requires_grad.__get__, _Tensor.grad.__get__
_version = _Tensor._version.__get__


class Place(NamedTuple):
    """Where a parameter is held; nothing refers to it from here, not even weakly, for then it could not be swapped."""

    module: weakref.ref[nn.Module]
    name: str


class Seen(NamedTuple):
    """A parameter that is trained, and its gradient: by their ids, and how often each was written to; 0 and 0: none."""

    parameter: int
    version: int
    gradient: int
    gradient_version: int


class ByHand:
    """Looks at some parameters where a forward or a backward begins, in the thread that trains.

    Args:
        names: of the models whose parameters are looked at.
        own_failure: is told of errors of hookd itself.
        by_backward: whether each forward after a backward begins a step, because this torch tells of no optimizers (before
            2.0); so it is as well when UNEXPLAINED backwards have made none.
    """

    def __init__(self, *, names: Names, own_failure: Callable[[str, BaseException], None], by_backward: bool) -> None:
        self._names, self._own_failure = names, own_failure
        self._by_backward = by_backward
        self._is_believed = by_backward
        self._seen = 0  # steps that are not believed yet
        self._models: dict[tuple[int, int], Watched] = {}  # by ordinal and root
        self._main = 0  # the model with the most parameters
        self._backwards = 0  # since the last step
        self._had_graph = self._has_backward = self._has_moved = False
        self._called = 0  # the model whose call was the last turn

    def forward_begins(self) -> int:
        """Look, and return how many steps are over that nobody has been told of."""
        had_graph, self._had_graph = self._had_graph, torch.is_grad_enabled()
        try:
            self._find()
            if not (self._backwards or had_graph or self._had_graph):
                return 0
            if self._backwards > UNEXPLAINED:
                self._by_backward = self._is_believed = True
            is_over, has_moved = False, False
            for one in self._models.values():
                now = one.look()
                has_moved = has_moved or _have_moved(one.before, now)
                is_over = is_over or _are_cleared(one.after, now)
                one.before = now
        except Failure as failure:  # a parameter may be of any class
            self._own_failure("steps without an optimizer", failure)
            return 0
        self._has_moved = has_moved
        if self._backwards:
            return self._over() if is_over or has_moved or self._by_backward else 0
        return self._over() if has_moved and had_graph else 0

    def backward_begins(self) -> int:
        """Look, and return the same: gradients may be cleared after the forward."""
        is_over = False
        try:
            for one in self._models.values():
                one.before = one.look()  # what a forward has written to itself is no step
                is_over = is_over or _are_cleared(one.after, one.before)
        except Failure as failure:
            self._own_failure("steps without an optimizer", failure)
            return 0
        return self._over() if is_over and self._backwards else 0

    def backward_done(self) -> None:
        """Note that there are gradients."""
        self._backwards += 1
        self._has_backward = True
        try:
            for one in self._models.values():
                if not one.places:
                    one.search()  # it may be trained from now on
                one.after = one.look()
        except Failure as failure:
            self._own_failure("steps without an optimizer", failure)

    def finish(self) -> int:
        """Return how many steps are over when nothing begins any more."""
        found = self.forward_begins()
        self._is_believed = True
        return found or self._told()

    def is_turn(self, module: Module) -> bool:
        """Whether the call of the largest model before this one stands for a step: no backward has followed it."""
        if self._has_backward or module.root != self._main:
            return False
        last, self._called = self._called, module.root
        if not self._has_moved:
            self._seen = 0  # weights that change only now and then are loaded
        return last == module.root

    def _over(self) -> int:
        self._backwards = 0
        self._seen += 1
        self._is_believed = self._is_believed or self._seen >= BELIEVED
        return self._told()

    def _told(self) -> int:
        told, self._seen = (self._seen, 0) if self._is_believed else (0, self._seen)
        return told

    def _find(self) -> None:
        """Watch models that have come, and forget those that have gone."""
        live = {(model.ordinal, id(root)): root for model, root in self._names.live_roots()}
        if live.keys() == self._models.keys():
            return
        self._models = {key: one for key, one in self._models.items() if key in live}
        room = MOST - sum(len(one.places) for one in self._models.values())
        for key, root in live.items():
            if key not in self._models:
                one = self._models[key] = Watched(root, max(0, min(WATCHED, room)))
                room -= len(one.places)
        # A loss or a metric has no parameters, and alone is no model.
        sizes = {ordinal: one.size for (ordinal, _), one in self._models.items() if one.size}
        self._main = max(sizes, key=sizes.__getitem__, default=0)


class Watched:
    """A model, and those of its parameters that are looked at.

    Attributes:
        size: how many parameters it has, as far as they were gone through.
        before: what was seen of those when something began.
        after: and when the last backward was over.
    """

    def __init__(self, root: nn.Module, most: int) -> None:
        self._root, self._most = weakref.ref(root), most
        self.size = 0
        self.places: list[Place] = []
        self.before: list[Seen | None] = []
        self.after: list[Seen | None] = []
        self.search()

    def search(self) -> None:
        """Choose the parameters."""
        root = self._root()
        if root is None or not self._most:
            return
        found = list(islice(_places(root), SEARCHED))
        self.size = len(found)
        with plainly():
            self.places = list(islice((place for place in found if _look(place) is not None), self._most))
        self.before = self.after = self.look()

    def look(self) -> list[Seen | None]:
        """Look at each."""
        with plainly():
            return list(map(_look, self.places))


def _places(root: nn.Module) -> Iterator[Place]:
    for _, module in modules_in(root):
        yield from (Place(weakref.ref(module), name) for name in parameters_of(module))


def _look(place: Place) -> Seen | None:
    """Look at a parameter; None if it is gone, not trained, or for the moment something that was computed."""
    module = place.module()
    found = None if module is None else entries(attributes_of(module).get("_parameters")).get(place.name)
    if found is None or not (_requires_grad(found) and _is_leaf(found)) or _Tensor.is_inference(found):
        return None
    grad = _grad(found)
    if grad is None or _Tensor.is_inference(grad):
        return Seen(id(found), _version(found), 0, 0)
    return Seen(id(found), _version(found), id(grad), _version(grad))


def _have_moved(before: list[Seen | None], now: list[Seen | None]) -> bool:
    """Say whether any of these was written to; another tensor in its place tells nothing."""
    both = ((then, one) for then, one in zip(before, now) if then is not None and one is not None)
    return any(then.parameter == one.parameter and then.version != one.version for then, one in both)


def _are_cleared(after: list[Seen | None], now: list[Seen | None]) -> bool:
    """Say whether gradients that a backward has left are gone, or were written to, or another parameter is there."""
    both = ((then, one) for then, one in zip(after, now) if then is not None and one is not None)
    return any(
        then.gradient and (then[2:] != one[2:] if then.parameter == one.parameter else not one.gradient)
        for then, one in both
    )
