"""What a person asks a live process: its modules, its stacks, an expression. Runs in the target, in hookd's own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd.errors import ControlError
from hookd.target.remote.stacks import stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.modeltree.snapshot import Trees
    from hookd.target.remote.control import Connection
    from hookd.target.remote.evaluate import Evaluations


class Questions:
    """Answers them; each request is done at once or in portions, so that the next one does not wait.

    Args:
        trees: of the models.
        evaluations: of expressions.
        asking: gives the connection whose request is being handled.
    """

    def __init__(self, trees: Trees, evaluations: Evaluations, asking: Callable[[], Connection]) -> None:
        self._trees, self._evaluations, self._asking = trees, evaluations, asking
        self.operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "snapshot": self._snapshot, "stack": lambda _: stacks(), "eval": self._eval,
            "eval_look": self._evaluations.look,
        }  # fmt: skip

    def tick(self) -> None:
        """Do what is to be done about once a second."""
        self._evaluations.tick()

    def exiting(self) -> None:
        """The process ends: so do the evaluations, which would abort it from inside of torch's C++."""
        self._evaluations.end()

    def residue(self) -> list[str]:
        """Say what goes on when the agent leaves."""
        return [f"a thread that evaluates {one.expression[:80]!r}" for one in self._evaluations.running()]

    def _snapshot(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._trees.portion(request, self._asking())

    def _eval(self, request: dict[str, Any]) -> dict[str, Any]:
        connection = self._asking()
        if connection.is_gone():  # who asks has been told that nothing came back: nothing is to happen minutes later
            raise ControlError("who asks has gone", reason="bad-request")
        told = request.get("by")  # a daemon's word for who has asked it; the connection is the daemon's own
        by = (
            {key: told[key] for key in ("uid", "pid") if isinstance(told.get(key), int)}
            if isinstance(told, dict)
            else {}
        )
        return self._evaluations.begin(request, {"uid": connection.uid, "pid": connection.pid, **by})
