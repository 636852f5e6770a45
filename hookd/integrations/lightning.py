"""hookd for Lightning: `Trainer(callbacks=[HookdCallback()])`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback

import hookd


class HookdCallback(hookd.Observation, Callback):  # type: ignore[misc]
    """Callback that observes `fit` in every rank, even if `fit` raises; it stores nothing in checkpoints.

    Its arguments are those of `hookd.observe`; `report` is set once the training has ended.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start observing, in each process that trains, before its first batch."""
        if stage == "fit":
            self.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop observing."""
        if stage == "fit":
            self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop observing after an exception, when no teardown follows."""
        self.end()
