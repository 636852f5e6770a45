"""Act on a NaN in addition to the report: raise, pause or skip. Each must be chosen by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hookd import Context, TrainingError, groups_of, peek

if TYPE_CHECKING:
    from torch.optim import Optimizer

POLICIES = ("report", "raise", "pause", "skip")


class NonFiniteError(TrainingError, FloatingPointError):
    """The exception that `policy=raise` raises in the training code, with the message of the incident."""


class Policy:
    """Carries out the option `policy`, in the training thread."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self.name = context, name
        self._acted = context.counter("policy", "Actions taken on a NaN or an infinity.", ["policy"])
        if name != "report":
            self._acted.labels(name).inc(0)
        self._due = ""
        self._has_refused = False

    def may_skip(self, optimizer: Optimizer) -> bool:
        """Whether a step is to be skipped if its gradients are bad."""
        if self.name != "skip" or peek(optimizer, "found_inf") is not None:
            return False  # a fused optimizer under a GradScaler skips by itself
        if issubclass(type(optimizer), torch.optim.LBFGS):
            return self._refuse(
                "with LBFGS: when the gradients of one closure go bad, it has already used earlier ones"
            )
        if self._context.world_size > 1 and is_shared_out(optimizer):
            return self._refuse("if each rank holds a part of the gradients: one rank would skip a step that the"
                                " others make")  # fmt: skip
        return True

    def _refuse(self, why: str) -> bool:
        if not self._has_refused:
            self._has_refused = True
            self._context.incident("refused", f"nan: policy=skip does nothing {why}")
        return False

    def act_on(self, message: str, *, is_late: bool) -> None:
        """Act on an incident, at once or, if it is late, at the training's next call of a model.

        Args:
            message: the message of the incident.
            is_late: the training code has continued since the bad value.
        """
        if self.name in ("raise", "pause"):
            self._due = message
            if not is_late:
                self.act()

    def act(self) -> None:
        """Carry out the pending action, if there is one.

        Raises:
            NonFiniteError: the policy is `raise`.
        """
        if self._due:
            message, self._due = self._due, ""
            self._acted.labels(self.name).inc()
            if self.name == "raise":
                raise NonFiniteError(message)
            self._pause()

    def _pause(self) -> None:
        self._context.incident("paused", f"nan: the training is paused ({self._context.origin}); it goes on after"
                               " `hookd plugin config PID nan policy=report`, or a detach")  # fmt: skip
        self._context.pause()

    def skip(self, optimizer: Optimizer) -> None:
        """Remove the gradients of an optimizer."""
        for group in groups_of(optimizer):
            for parameter in group["params"]:
                parameter.grad = None  # not zero: with zero gradients momentum would still move the parameter
        self._acted.labels(self.name).inc()


def is_shared_out(optimizer: Optimizer) -> bool:
    """Whether each rank holds only a part of the gradients, so that one may see a NaN that the others do not."""
    parameters = (parameter for group in groups_of(optimizer) for parameter in group["params"])
    return any(hasattr(type(one), "to_local") or type(one).__name__ == "FlatParameter" for one in parameters)
