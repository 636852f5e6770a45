"""How tests are handed to pytest-xdist's workers."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):
    """Give whole files to workers."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which a worker crashed, which has failed, and leave the worker's other tests to the others."""
        crashed = None
        for unit in self.assigned_work[node].values():
            crashed = next((nodeid for nodeid, is_done in unit.items() if not is_done), None)
            if crashed is not None:
                unit[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def schedule(self) -> None:
        """Hand each worker a second file: it begins its last test only when it knows the next one, or that there is none.

        pytest-xdist 3.8 gives one to the worker that takes a crashed one's place: with a single test in it, that waits
        for ever.
        """
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)
