"""Reports when a model switches to training or evaluation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hookd.target.entry.patch import Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads
    from hookd.target.events.dispatch import Dispatch
    from hookd.target.modeltree.names import Names


class Mode:
    """A replacement of `nn.Module.train`, which calls itself for all modules below; only the outermost call is reported."""

    def __init__(self, *, names: Names, life: Life, local: Threads, dispatch: Dispatch) -> None:
        self._names, self._life, self._local, self._dispatch = names, life, local, dispatch
        self._train: Replaced | None = None

    def install(self) -> None:
        """Replace `nn.Module.train`."""
        self._train = Replaced(nn.Module, "train", self._wrap_train)

    def restore(self) -> list[str]:
        """Restore `nn.Module.train`; return descriptions of what could not be undone."""
        if self._train is None or self._train.restore():
            return []
        return ["nn.Module.train: another tool has patched it on top of hookd, so it was not restored"]

    def _wrap_train(self, original: Any) -> Callable[..., Any]:
        def train(self: nn.Module, mode: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
            if not life.is_live:
                return original(self, mode)
            thread = local.thread
            thread.switching += 1
            try:
                result = original(self, mode)
            finally:
                thread.switching -= 1
            if not thread.switching:
                switched(self, mode)
            return result

        life, local = self._life, self._local
        switched = self._dispatch.callback(self._switched)
        return train

    def _switched(self, module: nn.Module, training: bool) -> None:  # noqa: FBT001
        known = self._names.known.get(id(module))
        if known is not None:
            self._dispatch.emit("mode", {"module": known[2], "training": training})
