"""Requests for a live process's modules, stacks, or the value of an expression. Runs in hookd's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookd.errors import ControlError
from hookd.target.remote.stacks import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hookd.target.modeltree.snapshot import Trees
    from hookd.target.remote.control import Connection
    from hookd.target.remote.evaluate import Evaluations
    from hookd.wire.agent import Caller, Request
    from hookd.wire.model import SnapshotPart


class Queries:
    """Answers requests, each at once or in portions, so that the next one does not wait; `asking` returns the connection."""

    def __init__(self, trees: Trees, evaluations: Evaluations, asking: Callable[[], Connection]) -> None:
        self._trees, self._evaluations, self._asking = trees, evaluations, asking
        self.operations: dict[str, Callable[[Request], Mapping[str, object]]] = {
            "snapshot": self._snapshot, "stack": lambda _: stacks(), "eval": self._eval,
            "eval_look": self._evaluations.state,
        }  # fmt: skip

    def tick(self) -> None:
        """Run the periodic work, about once a second."""
        self._evaluations.tick()

    def exiting(self) -> None:
        """End the evaluations when the process ends: they would abort it from inside torch's C++ code."""
        self._evaluations.end()

    def residue(self) -> list[str]:
        """Return descriptions of the evaluations that still run when the agent leaves."""
        return [f"a thread that evaluates {evaluation.expression[:80]!r}" for evaluation in self._evaluations.running()]

    def _snapshot(self, request: Request) -> SnapshotPart:
        return self._trees.part(request, self._asking())

    def _eval(self, request: Request) -> dict[str, int]:
        connection = self._asking()
        if connection.is_gone():  # the client has timed out: the expression must not run minutes later
            raise ControlError("the client has closed its connection", reason="bad-request")
        sender = request.get("by")  # a daemon names its client here: the connection is the daemon's own
        by: Caller = {"uid": connection.uid, "pid": connection.pid}
        if isinstance(sender, dict):
            for key in ("uid", "pid"):
                if isinstance(sender.get(key), int):
                    by[key] = sender[key]
        return self._evaluations.begin(request, by)
