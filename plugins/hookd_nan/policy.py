"""What is done about a NaN, beside telling of it: raise, pause or skip, each only where a person asked for it by name.

Runs in the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hookd import Context, TrainingError, groups_of, peek

if TYPE_CHECKING:
    from torch.optim import Optimizer

POLICIES = ("report", "raise", "pause", "skip")


class NonFiniteError(TrainingError, FloatingPointError):
    """What `policy=raise` raises in the training code; its message is the incident's."""


class Policy:
    """Acts, in the training thread."""

    def __init__(self, context: Context, name: str) -> None:
        self._context, self.name = context, name
        self.acted = context.counter("policy", "How often something was done about a NaN or an infinity.", ["policy"])
        if name != "report":
            self.acted.labels(name).inc(0)
        self._due = ""
        self._has_refused = False

    def may_skip(self, optimizer: Optimizer) -> bool:
        """Whether a step is to be skipped if its gradients are bad."""
        if self.name != "skip" or peek(optimizer, "found_inf") is not None:
            return False  # a fused optimizer that a GradScaler has told skips by itself
        if issubclass(type(optimizer), torch.optim.LBFGS):
            return self._refuse("with LBFGS: it has used the gradients of one closure when those of the next go bad")
        if self._context.world_size > 1 and is_shared_out(optimizer):
            return self._refuse("where each rank holds a part of the gradients: one rank would skip a step that the"
                                " others make")  # fmt: skip
        return True

    def _refuse(self, why: str) -> bool:
        if not self._has_refused:
            self._has_refused = True
            self._context.incident("refused", f"nan: policy=skip does nothing {why}")
        return False

    def told(self, message: str, *, is_late: bool) -> None:
        """Act on an incident; if the training code has gone on meanwhile, at its next call of a model."""
        if self.name in ("raise", "pause"):
            self._due = message
            if not is_late:
                self.act()

    def act(self) -> None:
        """Do what is due, if anything is.

        Raises:
            NonFiniteError: that is the policy.
        """
        if self._due:
            message, self._due = self._due, ""
            self.acted.labels(self.name).inc()
            if self.name == "raise":
                raise NonFiniteError(message)
            self._pause()

    def _pause(self) -> None:
        self._context.incident("paused", f"nan: the training is paused ({self._context.origin}); it goes on after"
                               " `hookd plugin config PID nan policy=report`, or a detach")  # fmt: skip
        self._context.pause()

    def skip(self, optimizer: Optimizer) -> None:
        """Leave an optimizer no gradients: with gradients of zero it would still move by its momentum."""
        for group in groups_of(optimizer):
            for parameter in group["params"]:
                parameter.grad = None
        self.acted.labels(self.name).inc()


def is_shared_out(optimizer: Optimizer) -> bool:
    """Whether each rank holds a part of the gradients: then one may see a NaN that the others do not."""
    for group in groups_of(optimizer):
        for parameter in group["params"]:
            if hasattr(type(parameter), "to_local") or type(parameter).__name__ == "FlatParameter":
                return True
    return False
