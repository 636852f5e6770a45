"""Begin and end of observation: the patches in torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hookd.wire.originals import RLock

if TYPE_CHECKING:
    from hookd.target.events.data import Data
    from hookd.target.events.steps import Steps
    from hookd.target.modeltree.models import Models


class Life:
    """The flag that says whether the agent observes.

    Attributes:
        is_live: False from the beginning of a detach; hookd's functions that are called after that only call through.
    """

    __slots__ = ("is_live",)

    def __init__(self) -> None:
        self.is_live = False


class Arming:
    """Replaces functions of torch by hookd's, and restores them.

    Attributes:
        residue: messages about functions that could not be restored.
    """

    def __init__(self, *, life: Life, steps: Steps, data: Data, models: Models) -> None:
        self._life, self._steps, self._data, self._models = life, steps, data, models
        self._installing = RLock()
        self._imported = 0  # number of imported modules at the last `install_late`
        self.residue: list[str] = []

    def arm(self) -> None:
        """Install all patches; modules are observed from the next outermost call on."""
        self._life.is_live = True
        self._imported = 0
        self._steps.install()
        with self._installing:
            self._data.install()
        self._models.install()

    def install_late(self) -> None:
        """Patch modules that were imported since the last time: dynamo, the DataLoader."""
        if len(sys.modules) == self._imported:
            return
        with self._installing:
            if self._life.is_live:
                self._imported = len(sys.modules)
                self._models.observer.register()
                self._data.install()

    def disarm(self) -> str:
        """Restore everything; return `identity`, or `pass-through` if another tool has patched `__call__` on top of hookd."""
        self._steps.finish()
        with self._installing:  # a step that ends now must install nothing
            self._life.is_live = False
        self.residue += [*self._steps.restore(), *self._data.restore()]
        restored, residue = self._models.restore()
        self.residue += residue
        return "identity" if restored else "pass-through"

    def restore_in_child(self) -> None:
        """Restore everything in a forked child, without locks: a thread of the parent may have held one at the fork."""
        self._steps.restore()
        self._data.restore()
        self._models.restore_in_child()
