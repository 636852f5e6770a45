"""Who is told that a model goes over to training or evaluation. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hookd.target.entry.patch import Replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.modeltree.names import Names
    from hookd.target.session import Session


class Mode:
    """`nn.Module.train` replaced by ours; it calls itself for all modules below, and only the outermost call is told."""

    def __init__(self, session: Session, names: Names) -> None:
        self._session = session
        self._names = names
        self._train: Replaced | None = None

    def install(self) -> None:
        """Replace it."""
        self._train = Replaced(nn.Module, "train", self._wrap_train)

    def restore(self) -> list[str]:
        """Put it back; give what could not be undone."""
        if self._train is None or self._train.restore():
            return []
        return ["nn.Module.train: somebody has patched on top of us"]

    def _wrap_train(self, original: Any) -> Callable[..., Any]:
        def train(self: nn.Module, mode: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
            if not session.is_live:
                return original(self, mode)
            thread = session.local.thread
            thread.switching += 1
            try:
                result = original(self, mode)
            finally:
                thread.switching -= 1
            if not thread.switching:
                switched(self, mode)
            return result

        session = self._session
        switched = session.dispatch.entrance(self._switched)
        return train

    def _switched(self, module: nn.Module, training: bool) -> None:  # noqa: FBT001
        known = self._names.known.get(id(module))
        if known is not None:
            self._session.dispatch.emit("mode", {"module": known[2], "training": training})
