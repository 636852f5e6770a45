"""hookd for Lightning: `Trainer(callbacks=[HookdCallback()])`. Runs in the target."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same library under its older name
    from pytorch_lightning.callbacks import Callback

import hookd


class HookdCallback(hookd.Observation, Callback):  # type: ignore[misc]
    """Observes `fit`, also one that raises, in every rank; nothing of it goes into a checkpoint.

    Arguments are those of `hookd.observe`; `report` is what was seen, once the training has ended.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start, in each process that trains, before its first batch."""
        if stage == "fit":
            self.begin()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop."""
        if stage == "fit":
            self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop where no teardown will come."""
        self.end()
