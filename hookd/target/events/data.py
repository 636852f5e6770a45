"""How long the training waits for its data: torch's DataLoader. Runs in the target.

`_BaseDataLoaderIter.__next__` gives a batch, with and without workers, and `DataLoader.__iter__` starts the workers
(torch/utils/data/dataloader.py, 1.11 to 2.14). Both are replaced at the class, so iterators that are under way are seen.
Data that comes in another way is none of `data`: nobody can tell it from other code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hookd.target.entry.patch import Replaced
from hookd.wire.page import MODULE, PHASES
from hookd.wire.page import PHASE as PHASE_CELL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.session import Session

PHASE = PHASE_CELL - MODULE
DATA = PHASES.index("data")
_SEEN = (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__"))


class Data:
    """Turns a thread to the phase `data` while it waits for a DataLoader."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replaced: list[Replaced] = []

    def install(self) -> None:
        """Replace what there is to replace; again at each step, for the module may be loaded later."""
        module = sys.modules.get("torch.utils.data.dataloader")
        if module is not None and not self._replaced:
            owners = [(getattr(module, owner, None), name) for owner, name in _SEEN]
            self._replaced = [Replaced(owner, name, self._wrap) for owner, name in owners if name in vars(owner)]

    def restore(self) -> list[str]:
        """Undo `install`; gives what could not be undone."""
        stuck = [one for one in self._replaced if not one.restore()]
        self._replaced.clear()
        return [f"{one.owner.__name__}.{one.name}: somebody has patched on top of us" for one in stuck]

    def _wrap(self, original: Any) -> Callable[[Any], Any]:
        def waited(self: Any) -> Any:
            if not session.is_live:
                return original(self)
            thread = session.local.thread
            phase = int(session.cells[thread.beat + PHASE])
            if phase == DATA or thread.busy:
                return session.models.aloud(thread, original, self)
            try:
                session.steps.begins()
                session.calls.turn(thread, DATA)
                return session.models.aloud(thread, original, self)
            finally:
                if session.is_live:
                    session.calls.turn(thread, phase)

        session = self._session
        return session.dispatch.entrance(waited, original)
