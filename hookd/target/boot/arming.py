"""When the agent observes the training, and when it does not. Runs in the target."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hookd.wire.originals import RLock

if TYPE_CHECKING:
    from hookd.target.events.data import Data
    from hookd.target.events.steps import Steps
    from hookd.target.modeltree.models import Models


class Life:
    """Whether the agent observes.

    Attributes:
        is_live: False from the beginning of a detach; functions of hookd's that are still called then call through.
    """

    __slots__ = ("is_live",)

    def __init__(self) -> None:
        self.is_live = False


class Arming:
    """Replaces functions of torch with hookd's, and puts them back.

    Attributes:
        residue: what could not be put back.
    """

    def __init__(self, *, life: Life, steps: Steps, data: Data, models: Models) -> None:
        self._life, self._steps, self._data, self._models = life, steps, data, models
        self._installing = RLock()
        self._imported = 0  # how many modules were imported at the last `install_late`
        self.residue: list[str] = []

    def arm(self) -> None:
        """Install everything; modules are observed from the next outermost call on."""
        self._life.is_live = True
        self._imported = 0
        self._steps.install()
        with self._installing:
            self._data.install()
        self._models.install()

    def install_late(self) -> None:
        """Install in modules that were imported since: dynamo, the DataLoader."""
        if len(sys.modules) == self._imported:
            return
        with self._installing:
            if self._life.is_live:
                self._imported = len(sys.modules)
                self._models.register()
                self._data.install()

    def disarm(self) -> str:
        """Restore everything; calls that are under way finish by themselves.

        Returns:
            `identity`, or `pass-through` where another tool has patched `nn.Module.__call__` on top of hookd.
        """
        self._steps.finish()
        with self._installing:  # a step that ends now must install nothing
            self._life.is_live = False
        self.residue += [*self._steps.restore(), *self._data.restore()]
        restored, residue = self._models.restore()
        self.residue += residue
        return "identity" if restored else "pass-through"

    def restore_in_child(self) -> None:
        """Restore everything in a forked child, where another thread of the parent's may have held a lock."""
        self._steps.restore()
        self._data.restore()
        self._models.restore_in_child()
