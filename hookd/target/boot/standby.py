"""Under `hookd run`, a forked child that begins to train gets an agent of its own. Runs in the target.

At the fork nothing may be started, and it cannot be told yet what the child is for. A data loader's worker, a tokenizer,
a pool never make an optimizer, clear gradients or run a backward; who does is a rank. So these three are watched until
the first of them happens, in the thread that does it and far from the fork; then they are as they were.
"""

from __future__ import annotations

import contextlib
import posix
from typing import TYPE_CHECKING, Any

import torch

from hookd.errors import worded
from hookd.target.entry.patch import Replaced
from hookd.wire.descriptors import write

if TYPE_CHECKING:
    from collections.abc import Callable


class Standby:
    """Calls `start` when this process begins to train. An error of it is told to `hookd run` and to nobody else.

    Args:
        start: starts an agent.
        directory: where `hookd run` looks for word of a failure, see `_site/sitecustomize.py`.
    """

    def __init__(self, start: Callable[[], None], directory: str) -> None:
        self._start, self._directory = start, directory
        watched = (
            (torch.optim.Optimizer, "__init__"),
            (torch.optim.Optimizer, "zero_grad"),
            (torch.autograd, "backward"),
        )
        self._replaced = [Replaced(owner, name, self._watch) for owner, name in watched]

    def _watch(self, original: Any) -> Any:
        def begins(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            return original(*args, **kwargs)

        return begins

    def _begin(self) -> None:
        replaced, self._replaced = self._replaced, []
        for one in replaced:
            one.restore()
        if not replaced:  # a copy that somebody has kept
            return
        try:
            self._start()
        except Exception as exc:  # noqa: BLE001  the training must not notice
            self._tell(exc)

    def _tell(self, exc: Exception) -> None:
        with contextlib.suppress(OSError):
            write(f"{self._directory}/failed-{posix.getpid()}", worded(exc).encode())
