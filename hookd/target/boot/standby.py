"""Attach to a forked child that begins to train, under `hookd run`.

The child gets its own agent. Nothing may be started during the fork, and the child's purpose is not known yet. A data
loader's worker, a tokenizer or a pool never creates an optimizer, clears gradients or runs a backward; a rank does. So
these three are watched until the first of them happens, in its thread and long after the fork. Then the watched functions
are restored.
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
    """Calls `start` when this process begins to train.

    An error of it is reported only to `hookd run`.

    Args:
        directory: directory in which `hookd run` looks for reports of failures, see `_site/sitecustomize.py`.
    """

    def __init__(self, start: Callable[[], None], directory: str) -> None:
        self._start, self._directory = start, directory
        optimizer = torch.optim.Optimizer
        watched = (optimizer, "__init__"), (optimizer, "zero_grad"), (torch.autograd, "backward")
        self._replaced = [Replaced(owner, name, self._watch) for owner, name in watched]

    def _watch(self, original: Any) -> Any:
        def begins(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            return original(*args, **kwargs)

        return begins

    def _begin(self) -> None:
        replaced, self._replaced = self._replaced, []
        for function in replaced:
            function.restore()
        if not replaced:  # called again through a reference that was kept to a wrapper
            return
        try:
            self._start()
        except Exception as exc:  # noqa: BLE001  the training must not notice
            self._log(exc)

    def _log(self, exc: Exception) -> None:
        with contextlib.suppress(OSError):
            write(f"{self._directory}/failed-{posix.getpid()}", worded(exc).encode())
