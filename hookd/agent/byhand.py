"""The steps of a training that no optimizer of torch makes: `p -= lr * p.grad`. Runs in the target.

Nobody calls us there, so it is told by what becomes of the parameters. A step was made when, since the last backward,
parameters were written to (their versions differ), or their gradients were cleared, as is done where `p.data` is written to,
which has no version. Without a backward there may be gradients of `torch.autograd.grad`: then versions alone tell.

Until an optimizer has stepped nobody knows that there is one, and a batch may be accumulated over many backwards: these
alone make no step, before UNEXPLAINED of them have had none.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd.agent.faults import Failure
from hookd.passive import attributes_of, entries, modules_in, parameters_of, plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from hookd.agent.session import Session
    from hookd.events import Module

WATCHED = 4
"""So many parameters are looked at, those of each model that are trained first."""
SEARCHED = 512
"""So many parameters of each model are gone through for them."""
UNEXPLAINED = 100


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
        session: whose models' parameters are looked at.
        by_backward: whether each forward after a backward begins a step, because this torch tells of no optimizers (before
            2.0); so it is as well when UNEXPLAINED backwards have made none.
    """

    def __init__(self, session: Session, *, by_backward: bool) -> None:
        self._session = session
        self._by_backward = by_backward
        self._models: list[int] = []  # the models that `_watched` is of
        self._main = 0  # the model with the most parameters
        self._watched: list[Place] = []
        self._before: list[Seen | None] = []  # what was seen of those when something began
        self._after: list[Seen | None] = []  # and when the last backward was over
        self._backwards = 0  # since the last step
        self._had_graph = self._has_backward = False
        self._called = 0  # the model whose call was the last turn

    def forward_begins(self) -> bool:
        """Look, and say whether a step is over."""
        had_graph, self._had_graph = self._had_graph, torch.is_grad_enabled()
        try:
            self._find()
            if not (self._backwards or had_graph or self._had_graph):
                return False
            now, before = self._look(), self._before
            self._before = now
            has_moved = _have_moved(before, now)
            is_over = self._is_over(now, has_moved) if self._backwards else has_moved and had_graph
        except Failure as failure:  # a parameter may be of any class
            self._session.dispatch.own_failure("steps without an optimizer", failure)
            return False
        return self._over() if is_over else False

    def backward_begins(self) -> bool:
        """Look, and say whether a step is over: gradients may be cleared after the forward."""
        try:
            self._before = self._look()  # what a forward has written to itself is no step
            is_over = bool(self._backwards) and _are_cleared(self._after, self._before)
        except Failure as failure:
            self._session.dispatch.own_failure("steps without an optimizer", failure)
            return False
        return self._over() if is_over else False

    def backward_done(self) -> None:
        """Note that there are gradients."""
        self._backwards += 1
        self._has_backward = True
        try:
            self._after = self._look()
        except Failure as failure:
            self._session.dispatch.own_failure("steps without an optimizer", failure)

    def is_turn(self, module: Module) -> bool:
        """Whether the call of the largest model before this one stands for a step: no backward has followed it."""
        if self._has_backward or module.root != self._main:
            return False
        last, self._called = self._called, module.root
        return last == module.root

    def _over(self) -> bool:
        self._backwards = 0
        return True

    def _is_over(self, now: list[Seen | None], has_moved: bool) -> bool:  # noqa: FBT001
        self._by_backward = self._by_backward or self._backwards > UNEXPLAINED
        return has_moved or self._by_backward or _are_cleared(self._after, now)

    def _find(self) -> None:
        """Choose the parameters anew when other models have come."""
        models = [(model.ordinal, root) for model, root in self._session.models.names.live_roots()]
        if [ordinal for ordinal, _ in models] == self._models:
            return
        self._models = [ordinal for ordinal, _ in models]
        self._watched, most = [], 0
        for ordinal, root in models:
            found = list(islice(_places(root), SEARCHED))
            if len(found) > most:
                self._main, most = ordinal, len(found)
            with plainly():
                self._watched += islice((place for place in found if _look(place) is not None), WATCHED)
        self._before = self._after = self._look()

    def _look(self) -> list[Seen | None]:
        with plainly():
            return list(map(_look, self._watched))


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
    """Say whether gradients that a backward has left are gone, or were written to."""
    both = ((then, one) for then, one in zip(after, now) if then is not None and one is not None)
    return any(then.gradient and then.parameter == one.parameter and then[2:] != one[2:] for then, one in both)
