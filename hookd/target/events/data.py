"""The time that the training waits for torch's DataLoader.

`_BaseDataLoaderIter.__next__` returns a batch, with and without workers, and `DataLoader.__iter__` starts the workers
(torch/utils/data/dataloader.py, 1.11 to 2.14). Both are replaced in the class, which also covers existing iterators.
Other ways of loading data do not count as `data`: they cannot be distinguished from other code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hookd.target.entry.patch import Replaced
from hookd.target.events.phases import PHASE
from hookd.wire.page import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads, ThreadState
    from hookd.target.plugins.accounts import Accounts
    from hookd.wire.page import PageWriter

DATA = PHASES.index("data")
_SEEN = (("DataLoader", "__iter__"), ("_BaseDataLoaderIter", "__next__"))


class Data:
    """Switches a thread to the phase `data` while it waits for a DataLoader.

    Args:
        call_visibly: calls a function of the training, visible to profilers.
        begins: called when something other than an optimizer's step begins.
        set_phase: switches a thread to another phase.
        callback: makes the functions that the training calls.
        accounts: charges hookd with its own time.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        page: PageWriter,
        life: Life,
        local: Threads,
        call_visibly: Callable[..., Any],
        begins: Callable[[], None],
        set_phase: Callable[[ThreadState, int], None],
        callback: Callable[..., Callable[..., Any]],
        accounts: Accounts,
    ) -> None:
        self._cells, self._life, self._local, self._accounts = page.cells, life, local, accounts
        self._call_visibly, self._begins, self._set_phase, self._entrance = call_visibly, begins, set_phase, callback
        self._replaced: list[Replaced] = []

    def install(self) -> None:
        """Replace both methods once their module is loaded; called at each step, because it may be imported later."""
        module = sys.modules.get("torch.utils.data.dataloader")
        if module is not None and not self._replaced:
            owners = [(getattr(module, owner, None), name) for owner, name in _SEEN]
            self._replaced = [Replaced(owner, name, self._wrap) for owner, name in owners if name in vars(owner)]

    def restore(self) -> list[str]:
        """Undo `install`, and return what could not be undone."""
        stuck = [replaced for replaced in self._replaced if not replaced.restore()]
        self._replaced.clear()
        return [
            f"{replaced.owner.__name__}.{replaced.name}: another tool has patched it on top of hookd, so it was not restored"
            for replaced in stuck
        ]

    def _wrap(self, original: Any) -> Callable[[Any], Any]:
        def waited(self: Any) -> Any:
            if not life.is_live:
                return original(self)
            thread = local.thread
            phase = int(cells[thread.beat + PHASE])
            if phase == DATA or thread.busy:
                return call_visibly(thread, original, self)
            accounts.leave()
            try:
                begins()
                set_phase(thread, DATA)
                accounts.come_back()
                return call_visibly(thread, original, self)
            finally:
                accounts.leave()
                if life.is_live:
                    set_phase(thread, phase)
                accounts.come_back()

        cells, life, local, call_visibly = self._cells, self._life, self._local, self._call_visibly
        begins, set_phase, accounts = self._begins, self._set_phase, self._accounts
        return self._entrance(waited, original)
