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
from typing import TYPE_CHECKING, Any

import torch

from hookd.agent.faults import Failure
from hookd.passive import of_tensor, parameters_in, plainly, requires_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    from hookd.agent.session import Session
    from hookd.events import Module

WATCHED = 16
"""So many parameters are looked at, those of each model that are trained first."""
SEARCHED = 512
"""So many parameters of each model are gone through for them."""
UNEXPLAINED = 100


class ByHand:
    """Looks at some parameters where a forward or a backward begins, in the thread that trains.

    Args:
        session: whose models' parameters are looked at.
        by_backward: whether each backward makes a step, because this torch tells of no optimizers (before 2.0).
    """

    def __init__(self, session: Session, *, by_backward: bool) -> None:
        self._session = session
        self._by_backward = by_backward
        self._models: list[int] = []  # the models that `_watched` is of
        self._main = 0  # the model with the most parameters
        self._watched: list[weakref.ref[Parameter]] = []
        self._versions: list[int | None] = []
        self._gradients: list[int | None] = []  # the versions of the gradients after the last backward
        self._backwards = 0  # since the last step
        self._had_graph = self._has_backward = False
        self._called = 0  # the model whose call was the last turn

    def forward_begins(self) -> bool:
        """Look, and say whether a step is over."""
        try:
            self._find()
            versions = self._versions_now()
            has_moved, self._versions = versions != self._versions, versions
            had_graph, self._had_graph = self._had_graph, torch.is_grad_enabled()
            is_over = self._is_over(has_moved) if self._backwards else has_moved and had_graph
        except Failure as failure:  # a parameter may be of any class
            self._session.dispatch.own_failure("steps without an optimizer", failure)
            return False
        return self._over() if is_over else False

    def backward_begins(self) -> bool:
        """Look, and say whether a step is over: gradients may be cleared after the forward."""
        try:
            is_over = bool(self._backwards) and self._are_cleared()
            self._versions = self._versions_now()  # what a forward has written to itself is no step
        except Failure as failure:
            self._session.dispatch.own_failure("steps without an optimizer", failure)
            return False
        return self._over() if is_over else False

    def backward_done(self) -> None:
        """Note that there are gradients."""
        self._backwards += 1
        self._has_backward = True
        try:
            self._gradients = self._gradients_now()
        except Failure as failure:
            self._session.dispatch.own_failure("steps without an optimizer", failure)

    def is_turn(self, module: Module) -> bool:
        """Whether the call of the largest model before this one stands for a step: no backward has followed it."""
        if self._has_backward or module.root != self._main:
            return False
        last, self._called = self._called, module.root
        return last == module.root

    def _over(self) -> bool:
        self._backwards, self._had_graph = 0, False
        return True

    def _is_over(self, has_moved: bool) -> bool:  # noqa: FBT001
        return has_moved or self._by_backward or self._backwards > UNEXPLAINED or self._are_cleared()

    def _are_cleared(self) -> bool:
        now = self._gradients_now()
        return any(then is not None and then != version for then, version in zip(self._gradients, now))

    def _find(self) -> None:
        """Choose the parameters anew when other models have come."""
        models = [(model.ordinal, root) for model, root in self._session.models.names.live_roots()]
        if [ordinal for ordinal, _ in models] == self._models:
            return
        self._models = [ordinal for ordinal, _ in models]
        self._watched, most = [], 0
        for ordinal, root in models:
            found = [parameter for _, parameter in islice(parameters_in(root), SEARCHED)]
            if len(found) > most:
                self._main, most = ordinal, len(found)
            self._watched += map(weakref.ref, islice(filter(requires_grad, found), WATCHED))
        self._versions, self._gradients = self._versions_now(), self._gradients_now()

    def _versions_now(self) -> list[int | None]:
        return [_version(ref()) for ref in self._watched]

    def _gradients_now(self) -> list[int | None]:
        held = [ref() for ref in self._watched]
        return [None if parameter is None else _version(of_tensor(parameter, "grad")) for parameter in held]


def _version(tensor: Any) -> int | None:
    """Return how often a tensor was written to, None of none, and of one that does not count (an inference tensor)."""
    with plainly():
        if tensor is None or torch.Tensor.is_inference(tensor):
            return None
    return int(of_tensor(tensor, "_version"))
