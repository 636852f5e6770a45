"""hookd for the Trainer of Hugging Face: `Trainer(..., callbacks=[HookdCallback()])`."""

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
    """Callback that observes `train()` from beginning to end in every rank; it stores nothing in checkpoints.

    Its arguments are those of `hookd.observe`; `report` is set once the training has ended.

    When `train()` raises, the Trainer calls no further callback (transformers 5.23, trainer.py `train`). So this one replaces
    `train` of the Trainer, at the end of the Trainer's `__init__`, by a function that ends the observation in either case. A
    callback that is added later, by `add_callback`, cannot do so: use `with hookd.observe(): trainer.train()` there instead.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace `train` of the Trainer under construction by a function that ends the observation."""
        trainer = _trainer_above()
        if trainer is not None:
            trainer.train = self._ending(trainer.train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start observing; with `auto_find_batch_size` this is called again after a batch was too large, and does nothing then."""
        self.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop observing."""
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
    """Return the Trainer whose method calls this callback; transformers does not pass it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
