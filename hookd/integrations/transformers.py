"""hookd for the Trainer of Hugging Face: `Trainer(..., callbacks=[HookdCallback()])`. Runs in the target."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

import hookd

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class HookdCallback(hookd.Observation, TrainerCallback):  # type: ignore[misc]
    """Observes from the beginning of `train()` to its end, in every rank; nothing of it goes into a checkpoint.

    Arguments are those of `hookd.observe`; `report` is what was seen, once the training has ended.

    A training that raises calls no callback any more (transformers 5.23, trainer.py `train`). So at the end of its own
    `__init__` a Trainer is given a `train` that ends the observation either way. A callback that comes later, by
    `add_callback`, has no such chance: there `with hookd.observe(): trainer.train()` does the same and needs no callback.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make `train` of the Trainer that is just being made end the observation."""
        trainer = _trainer_above()
        if trainer is not None:
            trainer.train = self._ending(trainer.train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start; with `auto_find_batch_size` it comes again where a batch was too large, and changes nothing."""
        self.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        self.end()

    def _ending(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.end()

        return observed


def _trainer_above() -> Any:
    """Find the Trainer whose method has called us: callbacks are not told."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
